"""Queue an API-format workflow on a running ComfyUI server, follow it over the websocket and save its video.

    python comfyui/client.py comfyui/api/demo.json
    python comfyui/client.py comfyui/api/demo.json 2.prompt="a blue star moving left" --output star.mp4

Prints the saved file's path last. Needs aiohttp, which ComfyUI has.
"""
import argparse
import asyncio
import json
import sys
import uuid
from pathlib import Path

import aiohttp


class Failed(Exception):
    """The server rejected the workflow, a node failed, or it was cancelled."""


def parse_arguments(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workflow", type=Path, help="a workflow in API format")
    parser.add_argument("changes", nargs="*", metavar="NODE.INPUT=VALUE", help="inputs to set first")
    parser.add_argument("--server", default="127.0.0.1:8188")
    parser.add_argument("--output", type=Path, help="where to save the video; default: under its own name, here")
    return parser.parse_args(arguments)


def change(workflow: dict, assignment: str) -> None:
    """Set one input: `3.seed=7`. The value is parsed as JSON if possible, else it is text."""
    target, _, value = assignment.partition("=")
    node, _, name = target.partition(".")
    if name not in workflow.get(node, {}).get("inputs", {}):
        known = ", ".join(f"{key}.{each}" for key, entry in workflow.items() for each in entry["inputs"])
        raise Failed(f"{assignment}: the workflow has no input {target}; it has {known}")
    try:
        workflow[node]["inputs"][name] = json.loads(value)
    except ValueError:
        workflow[node]["inputs"][name] = value


async def run_workflow(server: str, workflow: dict, output: Path | None) -> Path:
    """Queue a workflow, follow it and save its video; returns the file's path."""
    client = uuid.uuid4().hex
    path = f"/ws?clientId={client}"
    async with (
        aiohttp.ClientSession(f"http://{server}") as session,
        session.ws_connect(path, max_msg_size=0) as socket,
    ):
        prompt = await queue(session, workflow, client)
        await follow(socket, prompt)
        return await save(session, prompt, output)


async def queue(session, workflow: dict, client: str) -> str:
    """Queue a workflow; returns the prompt's id."""
    async with session.post("/prompt", json={"prompt": workflow, "client_id": client}) as answer:
        body = await answer.json()
        if answer.status != 200:
            raise Failed(f"the server refused the workflow: {json.dumps(body, indent=2)}")
        return body["prompt_id"]


async def follow(socket, prompt: str) -> None:
    """Print progress until the prompt is done."""
    async for message in socket:
        if message.type is not aiohttp.WSMsgType.TEXT:
            continue  # a preview picture
        event = json.loads(message.data)
        kind, data = event["type"], event["data"]
        if data.get("prompt_id") != prompt:
            continue
        if kind == "progress":
            print(f"\rnode {data['node']}: {data['value']} of {data['max']}    ", end="", file=sys.stderr)
        elif kind == "execution_error":
            raise Failed(f"node {data['node_id']} ({data['node_type']}): {data['exception_message'].strip()}")
        elif kind == "execution_interrupted":
            raise Failed("cancelled on the server")
        elif kind == "executing" and data["node"] is None:
            print(file=sys.stderr)
            return
    raise Failed("the server closed the connection")


async def save(session, prompt: str, output: Path | None) -> Path:
    """Download the first file that the prompt saved."""
    async with session.get(f"/history/{prompt}") as answer:
        outputs = (await answer.json())[prompt]["outputs"]
    listed = [file for saved in outputs.values() for files in saved.values() for file in files]
    files = [file for file in listed if isinstance(file, dict) and "filename" in file]
    if not files:
        raise Failed("the workflow saved nothing: it needs a node like Save Video")
    target = output or Path(Path(files[0]["filename"]).name)
    async with session.get("/view", params={key: files[0][key] for key in ("filename", "subfolder", "type")}) as answer:
        answer.raise_for_status()
        target.write_bytes(await answer.read())
    return target


def main() -> None:
    arguments = parse_arguments()
    try:
        workflow = json.loads(arguments.workflow.read_text())
        for assignment in arguments.changes:
            change(workflow, assignment)
        print(asyncio.run(run_workflow(arguments.server, workflow, arguments.output)))
    except (Failed, OSError, ValueError, aiohttp.ClientError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
