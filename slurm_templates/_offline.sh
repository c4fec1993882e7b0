# Compute nodes have no internet: a program that tries to reach it waits for minutes, on every rank.
export WANDB_MODE=offline  # later, on a login node: wandb sync wandb/offline-run-*
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TRANSFORMERS_OFFLINE=1
