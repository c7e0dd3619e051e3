r"""Pretrain a small decoder on public text: a folder that `hf:` and idiolect both read.

    python scripts/pretrain_decoder.py DATA --out base --size small --seconds 120 --device cuda
    python scripts/pretrain_decoder.py DATA --out src/idiolect/data/embedded/decoder --size tiny \
        --text plays docs --batch 16 --steps 2000       # the one that is shipped

DATA holds cross_sector/ and tinyshakespeare_roles/ (docs/data.md). What is read is the reviews of
`yelp` and `hotel` and the roles that `data.text.dealt` deals to pretraining; so no text of the
other roles, and none of cross_product, is in it: those are for studies. `amazon`, the third client
of cross_sector, is a client of cross_product too and is left out. The terms of the reviews allow
research; what is shipped reads plays (public domain) and the sentences of our own docs instead.

OUT gets config.json, model.safetensors (fp16) and tokenizer.json as transformers writes them for
LlamaForCausalLM, and pretraining.json: what was read, for how long, and the loss on held-back text.
Of the networks along the way the one with the lowest loss there is kept: text of so few words is
soon known by heart.

With --steps the same GPU and releases give the same network again: torch's repeatable kernels are
used. On a GPU a step is recorded as a graph once, and replayed (--eager: not).
"""

import argparse
import json
import math
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import torch
from safetensors.torch import save_file
from torch.nn import functional

from idiolect.data.text import dealt
from idiolect.data.tokenisers import Tokeniser, train_tokeniser
from idiolect.kernels.cuda_graph import GraphSequence

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"vocabulary": 1024, "width": 128, "layers": 4, "heads": 4, "inner": 344},
    "small": {"vocabulary": 4096, "width": 384, "layers": 6, "heads": 6, "inner": 1024},
}
REVIEWS = ("yelp", "hotel")
DOCS = Path(__file__).resolve().parents[1] / "docs"
SOURCES = {
    "reviews": "reviews of yelp and hotel (cross_sector)",
    "plays": "roles of Shakespeare dealt to pretraining",
    "docs": "sentences of this repository's docs",
}
REPEATED = {"reviews": 1, "plays": 2, "docs": 1}  # times that a text is read for one of reviews
HELD_BACK = 50  # of so many texts one, to measure the loss on
LONGEST = 512  # places that the network is to know
RECORDED = 5  # steps before one is recorded: they make handles and the optimiser's memory
CHECKED = (5, 6, 40)  # steps whose loss is measured without the graph too


def pretraining_texts(kind: str, data_dir: Path) -> list[str]:
    """Read the texts of one kind that bases may be pretrained on."""

    def rows(name: str) -> list[dict[str, Any]]:
        parts = [data_dir / name / f"{part}.parquet" for part in ("train", "test")]
        return [row for part in parts for row in pyarrow.parquet.read_table(part).to_pylist()]

    if kind == "reviews":
        return [r["text"] for r in rows("cross_sector") if r["client"] in REVIEWS]
    if kind == "plays":
        held = rows("tinyshakespeare_roles")
        return [r["text"] for r in held if dealt(r["client"]) == "pretraining"]
    pages = [path.read_text(encoding="utf-8") for path in sorted(DOCS.rglob("*.md"))]
    return [one for page in pages for one in prose(page)]


def prose(page: str) -> list[str]:
    """Return a page's paragraphs of words: no code, tables or headings; marks are left out."""
    bare = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    bare = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", bare)
    parts = [" ".join(part.split()) for part in bare.split("\n\n")]
    return [
        re.sub(r"[*`>]", "", p) for p in parts if re.match(r"[*>\s-]*[A-Z]", p) and "|" not in p
    ]


def stream(texts: list[str], tokeniser: Tokeniser) -> np.ndarray:
    """Put all texts one after the other, each between its marks."""
    return np.concatenate([tokeniser.framed(one) for one in tokeniser.encode(texts)])


def llama_config(size: dict[str, int]) -> dict[str, Any]:
    """Describe the network as transformers does."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": size["vocabulary"],
        "hidden_size": size["width"],
        "intermediate_size": size["inner"],
        "num_hidden_layers": size["layers"],
        "num_attention_heads": size["heads"],
        "num_key_value_heads": size["heads"],
        "head_dim": size["width"] // size["heads"],
        "max_position_embeddings": LONGEST,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "use_cache": True,
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 3,
        "torch_dtype": "float16",
        "dtype": "float16",
    }


def build(config: dict[str, Any]) -> torch.nn.Module:
    """Make the network at its random start."""
    from transformers import LlamaConfig, LlamaForCausalLM

    given = {k: v for k, v in config.items() if k not in ("torch_dtype", "dtype", "architectures")}
    return LlamaForCausalLM(LlamaConfig(**given))


def logits_of(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return logits [example, place, token]."""
    return model(input_ids=x, use_cache=False).logits


def loss_of(model: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the next token."""
    logits = logits_of(model, rows[:, :-1]).float()
    return functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def held_back_loss(model: torch.nn.Module, tokens: torch.Tensor, length: int) -> float:
    """Measure the loss on held-back text, in nats a token."""
    count = min(len(tokens) // (length + 1), 256)
    rows = tokens[: count * (length + 1)].reshape(count, length + 1)
    with torch.no_grad():
        parts = [loss_of(model, part).item() * len(part) for part in rows.split(32)]
    return sum(parts) / count


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Pretrain, writing OUT several times along the way and at the end."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else products vary
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.manual_seed(args.seed)
    draw = np.random.default_rng(args.seed)
    texts = {kind: pretraining_texts(kind, args.data_dir) for kind in args.text}
    learnt = {kind: [t for n, t in enumerate(own) if n % HELD_BACK] for kind, own in texts.items()}
    back = {kind: own[::HELD_BACK] for kind, own in texts.items()}
    size = SIZES[args.size]
    share = {kind: own[:: 3 if kind == "reviews" else 1] for kind, own in learnt.items()}
    some = [one for kind, own in share.items() for one in own * REPEATED[kind]]
    tokeniser = train_tokeniser(some, size["vocabulary"])
    streams = {kind: stream(own, tokeniser) for kind, own in learnt.items()}
    tokens = torch.from_numpy(
        np.concatenate([part for kind, own in streams.items() for part in [own] * REPEATED[kind]])
    ).to(args.device)
    tests = {k: torch.from_numpy(stream(own, tokeniser)).to(args.device) for k, own in back.items()}
    config = llama_config(size)
    cuda = args.device == "cuda"
    model = build(config).to(args.device)
    count = sum(p.numel() for p in {id(p): p for p in model.parameters()}.values())
    print(f"{count:,} parameters; {len(tokens):,} tokens to learn", flush=True)
    decays = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() < 2]
    optimiser = torch.optim.AdamW(
        [{"params": decays, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
        lr=torch.tensor(args.lr, device=args.device),  # which a graph reads anew
        betas=(0.9, 0.95),
        fused=cuda or None,
        capturable=cuda,
    )
    # Without a cache: a graph would keep the halves of its first weights.
    halved = torch.autocast(args.device, torch.bfloat16, enabled=cuda, cache_enabled=False)
    began, step, told, saved = time.monotonic(), 0, 0.0, 0.0
    record: dict[str, Any] = {}

    def save() -> None:
        with halved:
            lost = {kind: held_back_loss(model, own, args.length) for kind, own in tests.items()}
        print(lost, step, flush=True)
        if record and sum(lost.values()) > sum(record["held_back_loss"].values()):
            return
        record.update(
            size=args.size,
            parameters=count,
            vocabulary=size["vocabulary"],
            tokens_read=step * args.batch * args.length,
            tokens_of_text=len(tokens),
            seconds=round(time.monotonic() - began, 1),
            steps=step,
            held_back_loss={kind: round(one, 4) for kind, one in lost.items()},
            bytes_a_token={
                kind: round(len("".join(back[kind]).encode()) / len(tests[kind]), 3)
                for kind in back
            },
            tokeniser=tokeniser.digest,
            text="; ".join(SOURCES[kind] for kind in args.text),
            seed=args.seed,
        )
        write(args.out, config, model, tokeniser, record)

    rows = torch.zeros(args.batch, args.length + 1, dtype=tokens.dtype, device=args.device)

    def one_step() -> torch.Tensor:
        """Train on `rows`, at the rates that the optimiser holds."""
        optimiser.zero_grad(set_to_none=True)
        with halved:
            loss = loss_of(model, rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        return loss.detach()

    def measured() -> float:
        with torch.no_grad(), halved:
            return loss_of(model, rows).item()

    work, done = one_step, 0.0
    while done < 1:
        passed = time.monotonic() - began
        # The schedule is by time or by steps, whichever is given.
        done = step / args.steps if args.steps else passed / args.seconds
        warm = min(1.0, (step + 1) / 100)
        rate = args.lr * warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(done, 1.0))))
        for group in optimiser.param_groups:
            group["lr"].fill_(rate)
        at = torch.from_numpy(draw.integers(0, len(tokens) - args.length - 1, args.batch))
        places = at.to(args.device)[:, None] + torch.arange(args.length + 1, device=args.device)
        rows.copy_(tokens[places])
        if cuda and not args.eager and step == RECORDED:
            work = recorded(one_step) or one_step
        checked = work is not one_step and step in CHECKED
        expected, before = (measured(), decays[0].detach().clone()) if checked else (0.0, None)
        loss = work()
        if before is not None:
            if abs(loss.item() - expected) > 0.02 * expected or torch.equal(before, decays[0]):
                raise SystemExit(f"the graph is wrong ({loss.item()}, {expected}): use --eager")
        step += 1
        if passed - told > 15:
            told = passed
            print(f"step {step}, {passed:.0f} s: {loss.item():.3f}", flush=True)
        if passed - saved > args.save_every:
            saved = passed
            save()
    save()
    return record


def recorded(work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor] | None:
    """Record a step as a graph; return what replays it, or None where it cannot be recorded."""
    tape = GraphSequence()
    try:
        loss = tape.record(work)
    except RuntimeError as error:
        print(f"not recorded, so slower: {str(error).splitlines()[0]}", flush=True)
        return None

    def replay() -> torch.Tensor:
        tape.replay()
        return loss

    return replay


def write(
    out: Path,
    config: dict[str, Any],
    model: torch.nn.Module,
    tokeniser: Tokeniser,
    record: dict[str, Any],
) -> None:
    """Write the folder as transformers does; tied weights once."""
    out.mkdir(parents=True, exist_ok=True)
    held = {
        name: value.detach().to("cpu", torch.float16).contiguous()
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(held, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "tokenizer.json").write_text(tokeniser.json)
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (out / "tokenizer_config.json").write_text(json.dumps(kind, indent=2) + "\n")
    (out / "pretraining.json").write_text(json.dumps(record, indent=2) + "\n")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data_dir", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", choices=sorted(SIZES), default="small")
    parser.add_argument("--text", nargs="+", choices=SOURCES, default=["reviews", "plays"])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--steps", type=int, default=0, help="in place of seconds")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eager", action="store_true", help="record no step as a graph")
    parser.add_argument("--save-every", type=float, default=60.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
