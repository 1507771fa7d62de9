"""Doors that stood open once: ways out of a folder, into a server, or to hold one up."""
import contextlib
import json
import socket
import time
import uuid

import pytest
import yaml

from tests.conftest import ROOT, make_config
from tests.serving import DEADLINE, Server, connect
from wan_torchax.config import jobs, keys, trust
from wan_torchax.config.schema import ConfigError, FolderError
from wan_torchax.config.validation import validate
from wan_torchax.records.files import claimed
from wan_torchax.records.stored import read_mapping
from wan_torchax.serve import connections
from wan_torchax.serve.queue import Queue, append, events_from, read_state

# Nine lines that would be a list of a thousand million.
TEN = [f",&{name} [{','.join([f'*{before}'] * 10)}]" for before, name in zip("abcdefgh", "bcdefghi")]
BOMB = f"[&a [x,x,x,x,x,x,x,x,x,x]{''.join(TEN)}]"
SURROGATE = "half a cat \ud83d"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("doors") / "queue", "serve.connections=20")
    yield server
    server.close()


def read_list(folder, *lines):
    (folder / "list.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    return jobs.read(make_config(f"prompts={folder / 'list.jsonl'}"))


# ---------------------------------------------------------------- lists


@pytest.mark.parametrize("seed", ["7 #/../../../tmp/evil", "7\n/../..", "007", " 7 ", "0x7"])
def test_a_jobs_name_is_made_of_what_was_understood(tmp_path, seed):
    (job,) = read_list(tmp_path, {"prompt": "a cat", "seed": seed})
    assert (tmp_path / job.name).resolve().parent == tmp_path
    assert job.error or job.name.endswith("-seed7"), job
    assert job.error or "seed=7" in job.overrides


@pytest.mark.parametrize("value", [[], "[", "\0", "a\0b.png", "", [1], "[[1]]", BOMB, ["a.png", "b.png"]], ids=repr)
def test_one_bad_line_does_not_end_the_list(tmp_path, value):
    bad, good = read_list(tmp_path, {"prompt": "a cat", "image": value}, {"prompt": "a dog"})
    assert good.error is None
    if bad.error is None:  # the name of a file that is not there
        assert any(text.startswith(f"image='{tmp_path}/") for text in bad.overrides)
    else:
        assert bad.error.startswith("line 1: image=") and len(bad.error) < 200


def test_a_line_keeps_its_folder_wherever_the_list_lies(tmp_path):
    names = []
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        names.append(read_list(tmp_path / place, {"prompt": "a cat", "image": "cat.png"})[0].name)
    assert names[0] == names[1]


# ---------------------------------------------------------------- YAML


def in_time(seconds=2.0):
    """Of the processor: others may use the machine too."""
    began = time.process_time()
    return lambda: time.process_time() - began < seconds


@pytest.mark.parametrize("value", [BOMB, "[" + "1," * 400_000 + "]", "[" * 900, [[[1] * 100] * 100] * 100])
def test_a_value_that_grows_is_refused_at_once(value):
    quick = in_time()
    with pytest.raises(ConfigError, match="steps=.{1,60}: must be a whole number"):
        trust.offered_value("steps", value)
    assert quick()


@pytest.mark.parametrize("text", [
    "steps=[" + "1," * 4000 + "1]", f"steps='{BOMB}'", "prompt.text='" + "x" * 200_000 + "'",
])
def test_an_override_that_grows_is_refused_at_once(text):
    quick = in_time()
    with pytest.raises(ConfigError):
        trust.repeated(text)
    assert quick()


def test_a_long_prompt_is_still_repeated():
    assert trust.repeated("prompt.text='" + "a cat " * 5000 + "'")


@pytest.mark.parametrize("text", [BOMB, "a: &a [1]\nb: *a", "a: 1\n" * 100_000])
def test_a_config_that_grows_is_refused_at_once(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    quick = in_time()
    with pytest.raises(ConfigError, match="cannot be read|not a mapping"):
        read_mapping(tmp_path / "config.yaml")
    assert quick()


# Of the command line and of conf/.
OWNERS = "validation.py", "caches.py", "caching.py", "page.py", "choices.py"


def test_yaml_is_read_in_one_place():
    """Nowhere else a stranger's text meets PyYAML: what validation reads is the owner's."""
    users = [path.name for path in (ROOT / "wan_torchax").rglob("*.py") if "yaml.safe_load" in path.read_text()]
    assert set(users) <= set(OWNERS), users
    assert yaml.load("[1, 2]", trust.PlainLoader) == [1, 2]


# ---------------------------------------------------------------- keys


@pytest.mark.parametrize("text", ["", "\n \n\t\n", "\ufeff\n"])
@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
def test_an_empty_file_of_keys_is_no_open_server(tmp_path, text, host):
    (tmp_path / "keys").write_text(text)
    with pytest.raises(ConfigError, match="holds no key"):
        validate(make_config("task=serve", f"serve.host={host}", f"serve.keys_file={tmp_path / 'keys'}"))


@pytest.mark.parametrize("value", [", ,", " "])
def test_an_empty_variable_is_no_open_server(monkeypatch, value):
    monkeypatch.setenv(keys.VARIABLE, value)
    for host in ("0.0.0.0", "127.0.0.1"):
        with pytest.raises(ConfigError, match="WAN_TORCHAX_KEYS: holds no key"):
            validate(make_config("task=serve", f"serve.host={host}"))


def test_dev_null_is_no_key():
    with pytest.raises(ConfigError, match="holds no key"):
        keys.read_keys("/dev/null")


# ---------------------------------------------------------------- the queue's folder


def strange(server, name, **changes):
    """A job's folder whose request.json says something else."""
    content = json.loads((server.queue.get(server.post(prompt="a cat")["id"]).folder / "request.json").read_text())
    folder = server.queue.folder / f"video_{name}"
    folder.mkdir()
    content = {key: value for key, value in (content | changes).items() if value is not ...}
    (folder / "request.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("changes", [
    {"created": ...}, {"created": "now"}, {"model": ...}, {"values": []}, {"values": {}}, {"digest": 7},
    {"keyed": None}, {"frames": "many"}, {"remixed_from": []}, {"fields": ...},
], ids=repr)
def test_a_strange_folder_is_left_alone(server, changes, caplog):
    folder = strange(server, uuid.uuid4().hex[:12], **changes)
    for path in ("/v1/videos?limit=100", "/page/runs", "/metrics"):
        server.get(path)
    server.get(f"/v1/videos/{folder.name}", 404)
    assert sum(folder.name in record.message for record in caplog.records) == 1, "told once"


@pytest.mark.parametrize("line", [
    "[]", "7", '{"event": 7}', '{"event": "step", "progress": "x"}', '{"a": 1}', "[" * 2000,
])
def test_strange_events_are_passed_over(tmp_path, line):
    append(tmp_path, {"event": "queued", "progress": 3})
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write(line + "\n")
    assert read_state(tmp_path).progress == 3 and len(events_from(tmp_path, 0)[0]) == 1


def test_half_a_character_is_refused_and_a_folder_that_has_one_is_listed(server):
    def post(path="", **fields):
        content = json.dumps(fields).encode()
        answer = server.client.post(f"/v1/videos{path}", content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400, answer.text

    made = server.post(prompt="a cat")
    for fields in ({"prompt": SURROGATE}, {"prompt": "a cat", "size": SURROGATE}, {"prompt": "a cat", SURROGATE: 1}):
        post(**fields)
    post(f"/{made['id']}/remix", prompt=SURROGATE)
    folder = strange(server, uuid.uuid4().hex[:12], values={"prompt.text": SURROGATE})
    listed = json.loads(server.get("/v1/videos?limit=100").content)["data"]
    assert (folder.name, SURROGATE) in [(video["id"], video["prompt"]) for video in listed]
    server.get("/page/runs"), server.get("/metrics")


def test_links_are_not_served(server, tmp_path):
    (tmp_path / "secret").write_text("secret")
    identifier = server.post(prompt="a cat")["id"]
    folder = server.queue.get(identifier).folder
    for name in ("video.mp4", "preview.png", "poster.png"):
        (folder / name).symlink_to(tmp_path / "secret")
    (folder / "inputs" / "image.png").symlink_to(tmp_path / "secret")
    (folder / "metrics.json").write_text(json.dumps({"seconds": {"total": 1}}))
    for path in ("content", "content?variant=thumbnail", "preview"):
        server.get(f"/v1/videos/{identifier}/{path}", 404)
    server.get("/page/runs")
    server.get(f"/page/runs/{identifier}/video.mp4", 404)
    remix = server.client.post(f"/v1/videos/{identifier}/remix", json={"prompt": "a dog"}).json()
    assert not list((server.queue.get(remix["id"]).folder / "inputs").iterdir())
    (server.queue.folder / f"video_{'f' * 12}").symlink_to(folder)
    assert server.queue.get(f"video_{'f' * 12}") is None


def test_a_lock_that_is_a_link_is_not_written_through(tmp_path):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "precious")
    with pytest.raises((OSError, FolderError)), claimed(tmp_path / "run"):
        pass
    assert (tmp_path / "precious").read_text() == "precious"


def test_a_job_that_goes_while_all_are_listed(tmp_path):
    """Another thread removes a job between two looks."""
    queue = Queue(tmp_path)

    class Going(dict):
        def __contains__(self, name):
            return True

    (tmp_path / f"video_{'a' * 12}").mkdir()
    queue.over = Going()
    assert queue.jobs() == []


# ---------------------------------------------------------------- requests


@pytest.mark.parametrize("path", ["/v1/videos?limit=", "/page/runs?start="])
@pytest.mark.parametrize("number", ["9" * 5000, "²", "-1", "1e3"])
def test_numbers_of_thousands_of_digits(server, path, number):
    server.get(path + number, 400)


def test_event_numbers_of_thousands_of_digits(server):
    identifier = server.post(prompt="a cat")["id"]
    headers = {"Last-Event-ID": "9" * 5000}
    with server.client.stream("GET", f"/v1/videos/{identifier}/events", headers=headers) as answer:
        assert answer.status_code == 200


@pytest.mark.parametrize("headers", [{"Host": "["}, {"Origin": "http://["}, {"Content-Length": "9" * 5000}], ids=repr)
def test_half_an_address(server, headers):
    answer = talk(server, "GET /v1/models HTTP/1.1", {"Host": server.url[7:]} | headers)
    assert int(answer.split()[1]) in (400, 403, 413), answer


def answered(client: socket.socket) -> str:
    """Headers and body, which may come apart."""
    content = b""
    while not content.endswith(b"ok\n"):
        more = client.recv(4096)
        assert more, content
        content += more
    return content.decode()


def is_closed(client: socket.socket) -> bool:
    """Whether the server ends it without a word; what was on its way then may be lost."""
    with contextlib.suppress(ConnectionError):
        return client.recv(100) == b""
    return True


def ends_though_more_comes(client: socket.socket) -> bool:
    deadline = time.monotonic() + DEADLINE
    client.settimeout(0.05)
    while time.monotonic() < deadline:
        with contextlib.suppress(ConnectionError, TimeoutError):
            client.sendall(b"a")
        with contextlib.suppress(TimeoutError):
            return is_closed(client)
    return False


def talk(server, line: str, headers: dict) -> str:
    with connect(server) as client:
        client.sendall("\r\n".join([line, *(f"{key}: {value}" for key, value in headers.items()), "", ""]).encode())
        return client.recv(4096).decode()


def test_connections_that_send_nothing_make_room(server):
    idle = [connect(server) for _ in range(40)]
    for number, client in enumerate(idle):
        if number % 2:
            client.sendall(b"GET /healthz HTT")
    server.get("/v1/models")
    server.get("/healthz")
    for client in idle:
        client.close()


def test_headers_have_a_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.3)
    server = Server(tmp_path / "queue")
    try:
        for start in (b"", b"GET / HTTP/1.1\r\nHost: x"):
            with connect(server) as client:
                client.sendall(start)
                assert is_closed(client)
        monkeypatch.setattr(connections, "HEADER_SECONDS", DEADLINE)
        with connect(server) as client:  # a second request has its own
            for _ in range(2):
                client.sendall(f"GET /healthz HTTP/1.1\r\nHost: {server.url[7:]}\r\n\r\n".encode())
                assert answered(client).endswith("ok\n")
            monkeypatch.setattr(connections, "HEADER_SECONDS", 0.3)
            client.sendall(b"GET /hea")
            assert ends_though_more_comes(client)
        monkeypatch.setattr(connections, "HEADER_SECONDS", 2)
        identifier = server.post(prompt="a cat")["id"]
        with server.client.stream("GET", f"/v1/videos/{identifier}/events") as answer:  # an answer has none
            lines = answer.iter_lines()
            assert next(lines)
            with connect(server) as later:
                assert is_closed(later)
            append(server.queue.folder / identifier, {"event": "loading", "progress": 1})
            assert any("loading" in line for line in lines)
    finally:
        server.close()


def test_health_beyond_the_limit(server):
    streams = []
    identifier = server.post(prompt="a cat")["id"]
    try:
        for _ in range(20):
            client = connect(server)
            client.sendall(f"GET /v1/videos/{identifier}/events HTTP/1.1\r\nHost: {server.url[7:]}\r\n\r\n".encode())
            assert b"200 OK" in client.recv(4096)
            streams.append(client)
        host = {"Host": server.url[7:]}
        assert "503" in talk(server, "GET /v1/models HTTP/1.1", host).split("\r\n")[0]
        assert "200" in talk(server, "GET /healthz HTTP/1.1", host).split("\r\n")[0]
    finally:
        for client in streams:
            client.close()
