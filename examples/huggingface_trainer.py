"""Fine-tune a small Llama with the Trainer of Hugging Face, so that it may be killed at any time.

    python examples/huggingface_trainer.py runs/llama                         # kill it, and start it again
    torchrun --nproc-per-node 2 examples/huggingface_trainer.py runs/llama2   # the same on several ranks

The model has random weights and the data is made up: nothing is downloaded.
"""

import os
import signal
import sys

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from ckptman.integrations.huggingface import CkptmanTrainerMixin


class Digits(Dataset[dict[str, torch.Tensor]]):
    """Sequences of 16 tokens that count upwards, each from a start of its own."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(16) + index) % 64
        return {"input_ids": tokens, "labels": tokens}


class ResumableTrainer(CkptmanTrainerMixin, Trainer):
    """The Trainer, saved and resumed by ckptman."""

    def training_step(self, *args: object, **kwargs: object) -> torch.Tensor:
        if self.state.global_step == int(os.environ.get("DIE_AT", "-1")):  # only to show what happens then
            self.checkpointer.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(*args, **kwargs)


torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, attention_dropout=0.1, **sizes))
args = TrainingArguments(
    output_dir=f"{sys.argv[1]}-out",
    num_train_epochs=3,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=1e-2,
    warmup_steps=5,
    dataloader_num_workers=2,
    logging_steps=10,
    eval_strategy="steps",
    eval_steps=5,
    save_steps=5,
    save_total_limit=3,
    load_best_model_at_end=True,
    use_cpu=not torch.cuda.is_available(),
    disable_tqdm=True,
    report_to=[],
)
trainer = ResumableTrainer(
    model, args, train_dataset=Digits(), eval_dataset=Digits(), checkpointer={"root": sys.argv[1]}
)
trainer.train()  # goes on from the newest checkpoint
if not trainer.checkpointer.should_stop():
    trainer.save_model()  # the best one, as from_pretrained() reads it
sys.exit(trainer.checkpointer.exit_code)
