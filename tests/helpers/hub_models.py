"""A program that saves random models of transformers in folders, with their inputs and outputs.

    python tests/helpers/hub_models.py FOLDER

For each model it writes a folder with `save_pretrained`, and adds `expected.npz`: the input and the
output of the model, in float32 and in bfloat16. Then it prints `ready`. After that it reads lines
from stdin: the folder of a model, a tab, and the folder of a peft adapter. It writes the output of
the model with the adapter into the adapter's folder, and prints `done`.

Tests run it in a separate process, so that PyTorch and JAX are not in one process, and all of
transformers' memory is freed.
"""

import os
import sys
from pathlib import Path

# Read nothing from the network, and write nothing into the user's folders.
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": f"{sys.argv[1]}/cache"}
os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

import numpy as np
import torch
import transformers as hub

WRITTEN = 12
LLAMA = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
VIT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 4}
RESNET = {"embedding_size": 8, "num_labels": 5}


def llama(**options):
    return hub.LlamaForCausalLM(hub.LlamaConfig(**LLAMA | options))


def gpt2():
    sizes = {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}
    ends = {"bos_token_id": None, "eos_token_id": None}
    return hub.GPT2LMHeadModel(hub.GPT2Config(**sizes, **ends))


def vit():
    sizes = {"intermediate_size": 48, "image_size": 16, "num_labels": 5}
    return hub.ViTForImageClassification(hub.ViTConfig(**VIT, **sizes))


def resnet(**options):
    return hub.ResNetForImageClassification(hub.ResNetConfig(**RESNET | options))


MODELS = {
    "llama": lambda: llama(),
    "llama-tied": lambda: llama(tie_word_embeddings=True, rope_parameters=LLAMA3),
    "gpt2": gpt2,
    "vit": vit,
    "resnet": lambda: resnet(hidden_sizes=[16, 32], depths=[2, 1]),
    "resnet-basic": lambda: resnet(layer_type="basic", hidden_sizes=[8, 16], depths=[2, 1]),
}


def fill(model):
    """Fill each array with different random numbers, also those that are initialized to 1 or 0."""
    random = torch.Generator().manual_seed(0)
    for name, array in model.state_dict(keep_vars=True).items():
        if not array.is_floating_point():
            continue
        drawn = torch.randn(array.shape, generator=random)
        with torch.no_grad():
            if name.endswith("running_var"):
                array.copy_(0.5 + drawn.abs())
            elif array.ndim == 1:
                array.copy_(0.2 * drawn + name.endswith("weight"))
            else:
                # With a larger gain, the output is not the same token repeated.
                gain = 2.0 if "attn" in name or "mlp" in name else 1.0
                array.copy_(gain * drawn / max(1, array[0].numel()) ** 0.5)
    return model.eval()


def write(folder, name):
    """Write a model, its input and its output."""
    model = fill(MODELS[name]())
    # Small shards, so that there are several files and an index.
    model.save_pretrained(folder, **({"max_shard_size": "20KB"} if name == "llama" else {}))
    random = torch.Generator().manual_seed(1)
    if hasattr(model.config, "vocab_size"):
        given = torch.randint(0, model.config.vocab_size, (2, 9), generator=random)
    else:
        side = getattr(model.config, "image_size", 32)
        given = torch.randn((2, 3, side, side), generator=random)
    expected = {"given": given, "scores": model(given).logits}
    if hasattr(model.config, "vocab_size"):
        whole = model.generate(given, max_new_tokens=WRITTEN, do_sample=False)
        expected["written"] = whole[:, given.shape[1] :]
    half = model.to(torch.bfloat16)
    as_half = given.bfloat16() if given.is_floating_point() else given
    expected["half"] = half(as_half).logits.float()
    np.savez(folder / "expected.npz", **{key: x.numpy() for key, x in expected.items()})


def main():
    folder = Path(sys.argv[1])
    hub.utils.logging.disable_progress_bar()
    with torch.no_grad():
        for name in MODELS:
            write(folder / name, name)
        print("ready", flush=True)
        for line in sys.stdin:
            base, adapter = line.rstrip("\n").split("\t")
            from peft import PeftModel  # takes seconds to import

            model = hub.AutoModelForCausalLM.from_pretrained(base)
            model = PeftModel.from_pretrained(model, adapter).eval()
            given = torch.from_numpy(np.load(Path(base) / "expected.npz")["given"])
            np.save(Path(adapter) / "scores.npy", model(given).logits.numpy())
            print("done", flush=True)


if __name__ == "__main__":
    main()
