#!/usr/bin/env python3
"""Make a model folder that an engine can serve with made-up weights: a tokenizer and a `config.json`.

Rules:
1. Runs inside the engine's environment, which has `tokenizers` and `transformers`, and imports nothing of ours.
2. Nothing is downloaded and no weights are written: the engine fills them with random numbers
   (`--load-format dummy`), which costs the same arithmetic as trained ones.
3. The tokenizer learns from the standard library: the same Python version, the same folder, byte for byte.

    python build_model.py OUT --preset small
    python build_model.py OUT hidden layers heads kv_heads intermediate max_len
    python build_model.py OUT --preset tiny --lora           a LoRA adapter for that model, with made-up weights
"""

from __future__ import annotations

import argparse
import json
import sys
import sysconfig
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

VOCABULARY = 4096
BOS, EOS = "<|bos|>", "<|eos|>"
CORPUS_FILES = 150
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


class ModelShape(NamedTuple):
    """Dimensions of a Llama-like model, in the order of the command line."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    max_len: int


PRESETS = {
    "tiny": ModelShape(256, 2, 4, 2, 512, 4096),
    "small": ModelShape(768, 12, 12, 4, 2048, 4096),
    "hyb": ModelShape(256, 6, 4, 2, 512, 4096),
}
"""`tiny`, 2.2 M parameters, for protocol tests; `small`, 78.7 M, whose prefill on a CPU can be seen; `hyb`, whose
layers are of two kinds: two with a sliding window, then one with full attention, and again."""

HYBRIDS = ("hyb",)
WINDOW = 128
"""Tokens that a hybrid's window layers see."""

LORA_RANK = 8


def config(shape: ModelShape) -> dict[str, object]:
    """Return the `config.json` of `shape`; ValueError when hidden size, heads and kv_heads do not divide."""
    if shape.hidden % shape.heads or shape.heads % shape.kv_heads:
        raise ValueError(f"hidden must be a multiple of heads, and heads of kv_heads: {shape}")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.hidden // shape.heads,
        "max_position_embeddings": shape.max_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "bfloat16",
    }


def hybrid_config(shape: ModelShape) -> dict[str, object]:
    """Return the `config.json` of `shape` with two window layers to each full one; ValueError as `config`."""
    kinds = ["full_attention" if layer % 3 == 2 else "sliding_attention" for layer in range(shape.layers)]
    plain = config(shape)
    del plain["hidden_act"]
    return {
        **plain,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10000.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": WINDOW,
        "layer_types": kinds,
        "query_pre_attn_scalar": shape.hidden // shape.heads,
        "pad_token_id": 1,
    }


def corpus() -> list[str]:
    """Return the files that the tokenizer learns from: the first of the standard library, by name."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    return [str(path) for path in sorted(stdlib.glob("*.py"))[:CORPUS_FILES]]


def build_tokenizer(out: Path) -> None:
    """Train the byte-level tokenizer and save it into `out`; about two seconds."""
    # Imported here: the launcher reads PRESETS in an environment that has neither package.
    tokenizers: Any = import_module("tokenizers")
    transformers: Any = import_module("transformers")
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS, EOS],
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    tokenizer.train(corpus(), trainer)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, chat_template=CHAT_TEMPLATE
    ).save_pretrained(str(out))


def build_lora(out: Path, shape: ModelShape) -> None:
    """Write an adapter for a model of `shape`: its answers are the model's own, its cache is not."""
    numpy: Any = import_module("numpy")
    save: Any = import_module("safetensors.numpy").save_file
    rng = numpy.random.default_rng(1)
    out.mkdir(parents=True, exist_ok=True)
    head = shape.hidden // shape.heads
    tensors = {}
    for layer in range(shape.layers):
        for module, width in (("q_proj", shape.hidden), ("v_proj", shape.kv_heads * head)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            down = rng.normal(0.0, 0.01, (LORA_RANK, shape.hidden))
            tensors[f"{name}.lora_A.weight"] = down.astype(numpy.float32)
            tensors[f"{name}.lora_B.weight"] = numpy.zeros((width, LORA_RANK), numpy.float32)
    save(tensors, str(out / "adapter_model.safetensors"))
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": LORA_RANK,
        "lora_alpha": LORA_RANK,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
        "base_model_name_or_path": "made-up",
    }
    (out / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def build(out: Path, shape: ModelShape, hybrid: bool = False) -> None:
    """Write the model folder; the config comes last, so that a folder with one is a whole folder."""
    out.mkdir(parents=True, exist_ok=True)
    settings = json.dumps(hybrid_config(shape) if hybrid else config(shape), indent=2)
    build_tokenizer(out)
    (out / "config.json").write_text(settings + "\n", encoding="utf-8")


class ModelRequest(NamedTuple):
    """What the command line asks for."""

    out: Path
    shape: ModelShape
    hybrid: bool = False
    lora: bool = False


def parse(argv: list[str] | None) -> ModelRequest:
    """Read the command line; exits with status 2 and a message when it makes no sense."""
    parser = argparse.ArgumentParser(
        description="Make a model folder (tokenizer and config.json) that an engine serves with made-up weights."
    )
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("shape", type=int, nargs="*", metavar="N", help=" ".join(ModelShape._fields))
    parser.add_argument("--preset", choices=sorted(PRESETS))
    parser.add_argument("--lora", action="store_true", help="a LoRA adapter for such a model instead")
    args = parser.parse_args(argv)
    if args.preset and not args.shape:
        return ModelRequest(args.out, PRESETS[args.preset], args.preset in HYBRIDS, args.lora)
    if args.preset or len(args.shape) != len(ModelShape._fields):
        parser.error(f"pass --preset, or the six numbers: {' '.join(ModelShape._fields)}")
    return ModelRequest(args.out, ModelShape(*args.shape), lora=args.lora)


def main(argv: list[str] | None = None) -> int:
    """Build one folder; the exit status is 0, or 1 with a one-line message."""
    wanted = parse(argv)
    try:
        if wanted.lora:
            build_lora(wanted.out, wanted.shape)
        else:
            build(wanted.out, wanted.shape, wanted.hybrid)
    except (ImportError, OSError, ValueError) as error:
        print(f"build_model: {error}", file=sys.stderr)
        return 1
    print(wanted.out)
    return 0


if __name__ == "__main__":
    # Run as a file, Python looks for modules beside it first: this package's are not the libraries' own.
    sys.path = [place for place in sys.path if Path(place).resolve() != Path(__file__).resolve().parent]
    sys.exit(main())
