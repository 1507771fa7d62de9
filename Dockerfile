# An image for each kind of machine, of the project and what its lock names:
#   docker build --target cpu --tag wan-torchax:cpu .        (or tpu, or gpu; make image KIND=…)
#   docker run --rm -v wan-cache:/cache -v "$PWD/outputs:/app/outputs" wan-torchax:cpu prompt="a red circle"
#   docker run --rm --gpus all … wan-torchax:gpu preset=t2v_1_3b_480p_h200_v1
#   docker run --rm --privileged --network host … wan-torchax:tpu preset=t2v_1_3b_480p_v5e1_v1
# /cache holds downloads and compiled programs, /app/outputs the videos, /models checkpoints of your own. Not built here yet.

FROM python:3.12-slim AS base
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 XDG_CACHE_HOME=/cache HF_HOME=/cache/huggingface
RUN useradd --create-home --uid 1000 wan && mkdir -p /cache /models /app/outputs && chown wan /cache /models /app/outputs
WORKDIR /app

FROM base AS cpu-packages
COPY requirements/cpu.lock ./
RUN pip install --require-hashes -r cpu.lock

FROM base AS tpu-packages
COPY requirements/tpu.lock ./
RUN pip install --require-hashes -r tpu.lock

# JAX brings its CUDA as packages: of the machine only the driver is used.
FROM base AS gpu-packages
COPY requirements/gpu.lock ./
RUN pip install --require-hashes -r gpu.lock

FROM cpu-packages AS cpu
COPY --chown=wan . .
USER wan
VOLUME ["/cache", "/models", "/app/outputs"]
ENTRYPOINT ["python", "run.py"]

FROM tpu-packages AS tpu
COPY --chown=wan . .
USER wan
VOLUME ["/cache", "/models", "/app/outputs"]
ENTRYPOINT ["python", "run.py"]

FROM gpu-packages AS gpu
COPY --chown=wan . .
USER wan
VOLUME ["/cache", "/models", "/app/outputs"]
ENTRYPOINT ["python", "run.py"]
