"""The front: the Starlette application, run by uvicorn. It does not start JAX."""
import asyncio
import contextlib
import gc
import signal
import socket
import sys
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from wan_torchax.config.keys import read_keys
from wan_torchax.serve import api, errors, page
from wan_torchax.serve.connections import connection_class
from wan_torchax.serve.gallery import Gallery
from wan_torchax.serve.guard import Guard, digest
from wan_torchax.serve.measures import Measures
from wan_torchax.serve.queue import Queue
from wan_torchax.serve.requests import Base

HERE = Path(__file__).parent
STOP_SECONDS = 3  # grace period for open responses at shutdown
IDLE_SECONDS = 75  # keep-alive timeout: longer than that of clients and proxies, so that they close first


class Front:
    """State shared by the request handlers."""

    def __init__(self, base: Base, queue: Queue, ready):
        self.base, self.queue, self.ready = base, queue, ready
        self.serve = base.config.serve
        self.gallery = Gallery([Path(folder) for folder in self.serve.gallery], queue)
        self.measures = Measures(queue)
        self.keys = [digest(key) for key in read_keys(self.serve.keys_file)]
        self.draining = self.stopping = False


def make_app(front: Front, lifespan=None) -> Starlette:
    routes = [
        Route("/v1/videos", api.create, methods=["POST"]),
        Route("/v1/videos", api.listed),
        Route("/v1/videos/sync", api.create_and_wait, methods=["POST"]),
        Route("/v1/images/generations", api.create_images, methods=["POST"]),
        Route("/v1/videos/{id}", api.show),
        Route("/v1/videos/{id}", api.delete, methods=["DELETE"]),
        Route("/v1/videos/{id}/content", api.content),
        Route("/v1/videos/{id}/preview", api.preview),
        Route("/v1/videos/{id}/stream", api.watch),
        Route("/v1/videos/{id}/prompt", api.change_prompt, methods=["POST"]),
        Route("/v1/videos/{id}/events", api.events),
        Route("/v1/videos/{id}/remix", api.remix, methods=["POST"]),
        Route("/v1/models", api.models),
        Route("/v1/adapters", api.adapters),
        Route("/v1/adapters/{name}/picture", api.adapter_picture),
        Route("/healthz", api.alive),
        Route("/readyz", api.is_ready),
        Route("/metrics", api.metrics),
        Route("/", page.show),
        Route("/login", page.login, methods=["POST"]),
        Route("/page/queue", page.queue),
        Route("/page/videos", page.create, methods=["POST"]),
        Route("/page/estimate", page.estimate, methods=["POST"]),
        Route("/page/runs", page.runs),
        Route("/page/runs/{id}/{name}", page.run_file),
        Mount("/static", StaticFiles(directory=HERE / "static"), name="static"),
    ]
    middleware = [Middleware(Guard, front=front)]
    if front.serve.origins:
        allowed = dict(allow_methods=["GET", "POST", "DELETE"], allow_headers=["Authorization", "Idempotency-Key"])
        middleware.insert(0, Middleware(CORSMiddleware, allow_origins=list(front.serve.origins), **allowed))
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=errors.HANDLERS, lifespan=lifespan)
    app.state.front = front
    return app


def run(base: Base, queue: Queue, ready, listening: socket.socket) -> None:
    """Serve until the second SIGTERM; after the first, new videos are rejected."""
    front = Front(base, queue, ready)
    # Composing a config in a thread holds the GIL for a whole switch interval (5 ms by default), delaying responses.
    sys.setswitchinterval(1e-4)
    gc.freeze()  # imported modules are never garbage; scanning them would delay responses

    @contextlib.asynccontextmanager
    async def lifespan(app):
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, on_sigterm)
        host, port = listening.getsockname()[:2]
        print(f"http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
        yield

    def on_sigterm():
        server.should_exit = front.stopping = front.draining
        front.draining = True

    server = uvicorn.Server(uvicorn.Config(
        make_app(front, lifespan), http=connection_class(front.serve.connections),
        timeout_graceful_shutdown=STOP_SECONDS, timeout_keep_alive=IDLE_SECONDS,
        proxy_headers=False, server_header=False, log_config=None, log_level="warning", access_log=False,
    ))
    server.run(sockets=[listening])
