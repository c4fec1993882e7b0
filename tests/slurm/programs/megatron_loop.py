"""A training loop on megatron-core, with the arguments of Megatron's own loop and its ways to end early."""

import argparse
import signal
import sys
import time
from pathlib import Path

import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig

torch.cuda.current_device, torch.cuda.synchronize = (lambda: "cpu"), (lambda: None)  # megatron-core asks for them
TRACKER = "latest_checkpointed_iteration.txt"


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", type=Path, required=True)
    parser.add_argument("--load", type=Path, required=True)
    parser.add_argument("--train-iters", type=int, required=True)
    parser.add_argument("--save-interval", type=int, required=True)
    parser.add_argument("--exit-duration-in-mins", type=float)
    parser.add_argument("--exit-signal-handler", action="store_true")
    return parser.parse_args()


def make_model():
    tensor_parallel.model_parallel_cuda_manual_seed(1, inference_rng_tracker=True)  # this one does without CUDA
    config = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        tensor_model_parallel_size=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    return GPTModel(config, get_gpt_layer_local_spec(), vocab_size=128, max_sequence_length=16)


def state_of(model, iteration):
    return {"model": model.sharded_state_dict(), "iteration": iteration}


def save(args, model, iteration):
    folder = args.save / f"iter_{iteration:07}"
    folder.mkdir(parents=True, exist_ok=True)
    dist_checkpointing.save(state_of(model, iteration), str(folder))
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        (args.save / TRACKER).write_text(str(iteration))


def load(args, model):
    if not (args.load / TRACKER).exists():
        return 0
    iteration = int((args.load / TRACKER).read_text())
    loaded = dist_checkpointing.load(state_of(model, 0), str(args.load / f"iter_{iteration:07}"))
    model.load_state_dict(loaded["model"])
    return loaded["iteration"]


def is_on_any_rank(flag):
    told = torch.tensor([int(flag)])
    torch.distributed.all_reduce(told, torch.distributed.ReduceOp.MAX)
    return bool(told)


def why_exit(args, asked, began):
    if args.exit_signal_handler and is_on_any_rank(bool(asked)):
        return "exiting program after receiving SIGTERM."
    minutes = (time.monotonic() - began) / 60
    if args.exit_duration_in_mins and is_on_any_rank(minutes > args.exit_duration_in_mins):
        return f"exiting program after {minutes} minutes"
    return ""


def train(args, asked):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    iteration = load(args, model)
    rank, began = torch.distributed.get_rank(), time.monotonic()
    if rank == 0:
        print(f"starts at {iteration}", flush=True)
    tokens, mask = torch.arange(16)[None], torch.ones(1, 1, 16, 16).triu(1).bool()
    while iteration < args.train_iters:
        model(tokens, tokens, mask, labels=tokens).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        iteration += 1
        time.sleep(0.2 * Path("slow").exists())
        why = why_exit(args, asked, began)
        if why or iteration % args.save_interval == 0 or iteration == args.train_iters:
            save(args, model, iteration)
        if why:
            if rank == 0:
                print(why, flush=True)
            torch.distributed.destroy_process_group()
            sys.exit()  # with 0, as Megatron does
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    args, asked = arguments(), []
    if args.exit_signal_handler:
        signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    train(args, asked)
