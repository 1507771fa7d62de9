#!/bin/bash
# One video over two nodes of eight GPUs, with one process on each node; what is given to it goes to run.py:
#   sbatch docs/slurm.sh mesh=gpu_2x8 model=wan21_t2v_14b resolution=720p model.path=/shared/Wan2.1-T2V-14B-Diffusers prompt="a cat walks on the grass"
#SBATCH --job-name=wan
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=02:00:00
set -euo pipefail
srun --kill-on-bad-exit=1 "${PYTHON:-.venv/bin/python}" run.py distributed=auto hydra.run.dir="outputs/slurm-$SLURM_JOB_ID" "$@"
