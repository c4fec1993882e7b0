"""A training by the `Trainer` of transformers alone: `hf_trainer.py --output_dir DIR --max_steps N`."""

import time
from pathlib import Path

import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class Paced(TrainerCallback):
    def on_train_begin(self, args, state, control, **_):
        print(f"starts at {state.global_step}", flush=True)

    def on_step_end(self, args, state, control, **_):
        time.sleep(0.2 * Path("slow").exists())


(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
tokens = torch.arange(16)
trainer = Trainer(
    LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    ),
    arguments,
    train_dataset=[{"input_ids": tokens, "labels": tokens}] * 1000,
    callbacks=[Paced()],
)
last = get_last_checkpoint(arguments.output_dir) if Path(arguments.output_dir).is_dir() else None
trainer.train(resume_from_checkpoint=last)
