"""Feed every entrance of Leadline what it does not expect, and count what comes of it.

    python benchmarks/fuzz.py --cases 10000 --seed 1 [--area yaml] [--out FILE.json] [--jobs 2]

A case is drawn from its seed, its area and its number alone, so one can be run again by ``--area NAME --only NUMBER``.
It runs in a process of its own with 3 GiB of memory and 10 s of processor time, or 30 s in all, since machines may have
other work. It ends well if it gives a result or is refused in one line. It fails by a traceback, a message of several
lines, a hang, too much memory, a crash, or by changing files that it should only read.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import math
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a bare checkout
os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

# all that a case needs is imported before the processes fork, so that each starts at once
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch._dynamo
import transformers
import yaml
from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import leadline as ll
from leadline import cli, metrics, ops
from leadline.curing.folders import cure_folder
from leadline.data.images.cache import decoded
from leadline.data.images.sets import open_rows
from leadline.data.text.files import open_text
from leadline.data.text.store import tokenised, tokenizer_for
from leadline.data.text.tokenizers import load_tokenizer
from leadline.errors import LeadlineError, Stopped
from leadline.machine import processor, versions
from leadline.models.checkpoints import digest
from leadline.probing import open_model
from leadline.report import read_report
from leadline.training import load_recipe, train
from leadline.training.writing import open_language_model

SECONDS, PATIENCE, MEMORY = 10, 30, 3 << 30
RECIPES = Path(__file__).resolve().parents[1] / "recipes"
Draw = random.Random

NUMBERS = [0, 1, -1, 2, 0.5, 1.5, -0.5, 1e-320, 1e308, -1e308, 2**31, 2**63, -(2**63), 2**64, 10**30, float("nan"),
           float("inf"), float("-inf")]  # fmt: skip
TEXTS = ["", " ", "x", "../..", "/dev/null", "/dev/full", "\x00", "\n\n", "a\nb", "[red]", "[/]", "=1+1", "%s{0}",
         "0777", "1e400", "~", "null", "yes", "é" * 90, "x" * 100_000, "\ud800", "-1", "cuda", "best"]  # fmt: skip
OTHERS = [None, True, False, [], {}, [[]], [None], {"a": {"b": []}}, [1, "a"], {"name": None}]


def value(draw: Draw) -> Any:
    """A number, a text or something else that nobody expects."""
    kind = draw.random()
    if kind < 0.5:
        return draw.choice(NUMBERS)
    return draw.choice(TEXTS) if kind < 0.8 else draw.choice(OTHERS)


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place inside lists and mappings."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree[:40]) if isinstance(tree, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


def changed(tree: Any, draw: Draw) -> Any:
    """The same JSON with one to three values changed, removed or added."""
    tree = json.loads(json.dumps(tree))
    for _ in range(draw.randint(1, 3)):
        there = list(places(tree))
        if not there:
            return value(draw)
        *path, last = draw.choice(there)
        at = tree
        for key in path:
            at = at[key]
        action = draw.random()
        if action < 0.7:
            at[last] = value(draw)
        elif action < 0.85:
            del at[last]
        elif isinstance(at, dict):
            at[draw.choice(["name", "x", "\n", "length"])] = value(draw)
    return tree


def damage(file: Path, draw: Draw) -> None:
    """Flip, cut, empty, exchange or replace a file; change the values of one that holds JSON."""
    kind = draw.random()
    content = file.read_bytes()
    if kind < 0.4 and file.suffix == ".json":
        try:
            file.write_text(json.dumps(changed(json.loads(content), draw)))
            return
        except ValueError:
            pass
    if kind < 0.5:
        at = bytearray(content or b"x")
        for _ in range(draw.choice([1, 1, 8, 64])):
            at[draw.randrange(min(len(at), draw.choice([64, 4096, len(at)])))] = draw.randrange(256)
        file.write_bytes(at)
    elif kind < 0.6:
        file.write_bytes(content[: draw.randrange(len(content) + 1)])
    elif kind < 0.7:
        file.write_bytes(
            draw.choice([b"", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000, b"null", b"[1]", b"\0" * 999])
        )
    else:
        file.unlink()
        if kind < 0.78:
            os.mkfifo(file)
        elif kind < 0.86:
            file.mkdir()
        elif kind < 0.94:
            file.symlink_to(draw.choice(["/dev/zero", "/nowhere", file.name, "/dev/null", "/"]))


def damaged_copy(source: Path, target: Path, draw: Draw) -> Path:
    """A copy of a folder in which one or two files are damaged; their manifest may be made to match."""
    shutil.copytree(source, target)
    files = sorted(file for file in target.rglob("*") if file.is_file())
    for file in draw.sample(files, draw.choice([1, 1, 2])):
        damage(file, draw)
    if draw.random() < 0.6:
        for manifest in target.rglob("manifest.json"):
            if manifest.is_file() and manifest.stat().st_size < 1 << 16:
                match(manifest)
    return target


def match(manifest: Path) -> None:
    """Write the sizes and digests of damaged files into their manifest."""
    try:
        content = json.loads(manifest.read_text())
        for name, entry in content["files"].items():
            file = manifest.parent / name
            if file.is_file():
                entry |= {"size": file.stat().st_size, "sha256": digest(file)}
        manifest.write_text(json.dumps(content))
    except (ValueError, TypeError, KeyError, AttributeError, OSError):
        return


# --- the areas: each gets its draw, an empty folder and the folder of the samples, which it must not change


def recipes(draw: Draw, at: Path, samples: Path) -> None:
    """Recipes whose values are of other types and sizes, and settings on the command line."""
    tree = yaml.safe_load(draw.choice(sorted(RECIPES.glob("*.yaml"))).read_text())
    file = at / "recipe.yaml"
    file.write_bytes(yaml.safe_dump(changed(tree, draw)).encode(errors="surrogatepass"))
    keys = [
        "length",
        "model.depth",
        "batch.size",
        "schedule.warmup",
        "seed",
        "data.path",
        "out",
        "optimizer.betas",
        "a.b.c",
    ]
    settings = [f"{draw.choice(keys)}={value(draw)}" for _ in range(draw.randint(0, 2))]
    recipe = load_recipe(file, settings)
    with torch.device("meta"):
        if recipe.model.name in ll.list_models():
            ll.create_model(recipe.model.name, **recipe.model_options())


SNIPPETS = [
    "!!python/object:os.system x", "&a [*a]", "!!int x", "? [a]: b", "<<: 1", "<<: [1]", "0b_", "0x", "0777", "{",
    "[" * 3000, "- " * 3000, "*b", "!!binary ===", "!<tag:x> y", "1:99:99", "2001-99-99", "\t- x", "%YAML 9.9",
    "---\n---", "a: b: c", "{1: 2}", "? ", "!!set {a}", "|\n x", "'", '"\\ud800"', "\x07", "9" * 5000, "!!omap [a]",
    "&a &b c", "- - - x",
]  # fmt: skip


def yaml_text(draw: Draw, at: Path, samples: Path) -> None:
    """YAML with tags, aliases, nesting, broken scalars and bytes that are no text."""
    text = draw.choice(sorted(RECIPES.glob("*.yaml"))).read_text()
    for _ in range(draw.randint(1, 3)):
        place = draw.randrange(len(text) + 1)
        piece = draw.choice(SNIPPETS)
        if draw.random() < 0.15:
            bomb = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
            bomb += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, draw.randint(2, 12))]
            piece = "\n" + "\n".join(bomb) + "\n"
        cut = draw.choice([0, 0, draw.randrange(40)])
        text = text[:place] + draw.choice(["", "\n", " "]) + piece + text[place + cut :]
    content = bytearray(text.encode(errors="surrogatepass"))
    if draw.random() < 0.2:
        content[draw.randrange(len(content))] = draw.randrange(256)
    file = at / "recipe.yaml"
    file.write_bytes(content)
    load_recipe(file)


COMMANDS = {
    "probe": ["--depth", "--pretrained", "--out", "--before", "--blocks", "--no-trials", "--heatmaps", "--json"],
    "cure": ["--alpha", "--alpha-prime", "--de-escalation", "--de-escalation-at", "--layer", "--out", "--json"],
    "train": ["length=", "out=", "seed=", "model.depth=", "batch.size=", "data.path=", "checkpoint.every=", "--json"],
    "generate": ["--tokens", "--temperature", "--top-k", "--top-p", "--seed", "--no-cache", "--device", "--json"],
    "evaluate": ["--which", "--split", "--data", "--recipe", "--device", "--out", "--context", "--stride", "--json"],
    "models": ["--json"],
    "bench": ["attention"],
    "reproduce": ["nothing", "--list", "--out", "--seed"],
}
FLAGS = {"--no-trials", "--heatmaps", "--json", "--no-cache", "attention", "nothing", "--list"}


def command_line(draw: Draw, at: Path, samples: Path) -> None:
    """Commands with options that do not fit, on models and runs that are there or not."""
    os.chdir(at)
    names = [
        "model",
        "run",
        "gpt2",
        "bert",
        "cured",
        "report.json",
        "text",
        "tiny.py:build",
        "tiny.py:none",
        "nowhere",
        ".",
    ]
    names = [str(samples / name) for name in names] + ["timm:x", "file.py:x", "vit"]
    command = draw.choice(sorted(COMMANDS))
    words = [command]
    if command == "train":
        shutil.copy(samples / "digits.yaml", at / "digits.yaml")
        words += [draw.choice(["digits.yaml", "digits.yaml", draw.choice(names)]), "length=2 steps"]
    elif command == "bench":
        words += ["attention", "--nothing"]
    elif command in ("probe", "cure", "generate", "evaluate"):
        words += [draw.choice(names)] + (["prompt"] if command == "generate" else [])
        words += ["--tokens", "3"] if command == "generate" else ["--out", "out"] if command == "cure" else []
        words += ["--out", str(at / "evaluation")] if command == "evaluate" else []
    for _ in range(draw.randint(0, 3)):
        option = draw.choice(COMMANDS[command])
        given = draw.choice([*names, "out.html", "out.json", "out.xyz", *map(str, NUMBERS), *TEXTS])
        if option in ("--tokens", "length="):
            given = draw.choice(["0", "-1", "nan", "5 steps", "1e400"])
        given = given.replace("\0", "").encode(errors="replace").decode()
        words += (
            [option] if option in FLAGS else [f"{option}{given}"] if option.endswith("=") else [option, given[:50_000]]
        )
    closed = draw.choice([None] * 8 + [0, 1, 2])
    full = draw.random() < 0.05
    errors = os.open(at / "errors.txt", os.O_RDWR | os.O_CREAT)
    output = os.open("/dev/full" if full else at / "output.txt", os.O_RDWR | os.O_CREAT)
    for stream, handle in ((1, output), (2, errors)):
        os.dup2(handle, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if closed is not None:
        os.close(closed)
    sys.argv = ["leadline", *words]
    if closed is None:
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    try:
        cli.main()
        code: Any = 0
    except SystemExit as end:
        code = end.code
    lines = (at / "errors.txt").read_text(errors="replace").splitlines()
    if any("Traceback" in line for line in lines):
        raise AssertionError(f"{words}: {lines[-1]}")
    if code not in (0, None, 1, 2):
        raise AssertionError(f"{words}: exit code {code}")
    if code == 2:
        raise LeadlineError("refused")


def folders(draw: Draw, at: Path, samples: Path) -> None:
    """Damaged folders of models, checkpoints, runs and tokenizers."""
    name = draw.choice(["model", "run", "run", "gpt2", "bert", "cured", "text_run"])
    folder = damaged_copy(samples / name, at / name, draw)
    warnings.simplefilter("ignore")
    call = draw.choice(["load", "probe", "cure", "generate", "evaluate", "train" if "run" in name else "probe"])
    if call == "load":
        ll.load(folder)
    elif call == "probe":
        open_model(str(folder))
    elif call == "cure":
        cure_folder(folder, at / "out", alpha=0.5)
    elif call == "generate":
        open_language_model(folder, "cpu")
    elif call == "evaluate":
        from leadline.training.evaluate import evaluate

        evaluate(folder, out=at / "evaluation", device="cpu")
    else:
        recipe = samples / ("digits.yaml" if name == "run" else "text.yaml")
        train(load_recipe(recipe, [f"out={folder}", "length=7 steps"]), console=Console(quiet=True))


def reports(draw: Draw, at: Path, samples: Path) -> None:
    """Report files with changed values and damaged bytes, saved beside a good one."""
    good = samples / "report.json"
    file = at / "report.json"
    if draw.random() < 0.7:
        file.write_text(json.dumps(changed(json.loads(good.read_text()), draw)))
    else:
        shutil.copy(good, file)
        damage(file, draw)
    report, other = read_report(file), read_report(good)
    other.save(at / "page.html", before=report)
    report.save(at / "alone.html")
    str(report)
    if draw.random() < 0.1:
        report.save(at / "figure.svg", before=other)


def data(draw: Draw, at: Path, samples: Path) -> None:
    """Damaged text, compressed text, parquet, images and tokenizers."""
    kind = draw.choice(["text", "images", "tokenizer", "bytes"])
    if kind == "tokenizer":
        file = at / "tokenizer.json"
        shutil.copy(samples / draw.choice(["gpt2", "text_run"]) / "tokenizer.json", file)
        damage(file, draw)
        load_tokenizer(at).encode("some text")
        return
    if kind == "images":
        folder = damaged_copy(samples / draw.choice(["images", "cifar"]), at / "images", draw)
        name = "cifar10" if list(folder.rglob("*.parquet")) or not list(folder.rglob("*.png")) else "folder"
        decoded(open_rows(name, folder, "train"), draw.choice([8, 32, 8]), at / "cache")
        return
    if kind == "text":
        folder = damaged_copy(samples / "text", at / "text", draw)
    else:
        folder = at / "text"
        folder.mkdir()
        name = f"train{draw.choice(['.txt', '.txt.gz', '.txt.xz', '.txt.bz2', '.parquet'])}"
        (folder / name).write_bytes(draw.randbytes(draw.choice([0, 1, 100, 10_000])))
    corpus = open_text(folder)
    tokenizer = tokenizer_for(corpus, draw.choice(["byte", "word", "bpe"]), 300, at / "cache")
    tokenised(corpus, draw.choice(["train", "valid", "test", "x"]), tokenizer, at / "cache")


DTYPES = [
    torch.float32,
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.bool,
    torch.complex64,
]
SIZES = [0, 1, 2, 3, 5, 8]


def tensor(draw: Draw, shape: list[int]) -> torch.Tensor:
    """A tensor of some dtype, perhaps of other axes, with ordinary or extreme values."""
    shape = list(shape)
    if draw.random() < 0.1:
        action = draw.random()
        if action < 0.4 and shape:
            shape[draw.randrange(len(shape))] = draw.choice(SIZES)
        elif action < 0.7 and shape:
            shape.pop()
        else:
            shape.insert(0, draw.choice(SIZES))
    seed = torch.Generator().manual_seed(draw.randrange(2**31))
    x = torch.randn(shape, generator=seed, dtype=torch.float64)
    x = x * draw.choice([1, 1, 1, 0, 1e-45, 1e-30, 1e30, 3e38])
    if x.numel() and draw.random() < 0.1:
        x.view(-1)[0] = draw.choice([float("nan"), float("inf"), -float("inf")])
    dtype = draw.choice(DTYPES) if draw.random() < 0.1 else torch.float32
    return x.to(dtype)


def operators(draw: Draw, at: Path, samples: Path) -> None:
    """Attention over shapes, dtypes and options that do not fit each other."""
    b, h, m, n, d = (draw.choice([1, 2, 3, 5]) for _ in range(5))
    q, k, v = tensor(draw, [b, h, m, d]), tensor(draw, [b, h, n, d]), tensor(draw, [b, h, n, d])
    options: dict[str, Any] = {}
    for name, make in {
        "mask": lambda: tensor(draw, [b, 1, m, n]).real > 0 if draw.random() < 0.7 else tensor(draw, [b, 1, m, n]),
        "causal": lambda: draw.choice([True, False]),
        "dropout": lambda: draw.choice([*[0.0, 0.5] * 15, *NUMBERS]),
        "scale": lambda: draw.choice([None, 0.5, *NUMBERS]),
        "backend": lambda: draw.choice(["auto", "auto", "auto", "reference", "fused", "linear", "x"]),
    }.items():
        if draw.random() < 0.4:
            options[name] = make()
    which = draw.random()
    if which < 0.5:
        for name, choices in {"alpha_prime": [*[0.0, 0.5] * 15, *NUMBERS], "start": ["zero", "scores", "x"]}.items():
            if draw.random() < 0.5:
                options[name] = draw.choice(choices)
        if draw.random() < 0.3:
            options["alpha_prime"] = tensor(draw, draw.choice([[], [h], [7]]))
        if draw.random() < 0.3:
            options["bias"] = tensor(draw, [b, h, m, n])
        _, state = ops.hopfield_attention(q, k, v, **options)
        if draw.random() < 0.5:
            ops.hopfield_attention(q, k, v, state if draw.random() < 0.7 else (tensor(draw, [b, h, m, n]),), **options)
    elif which < 0.75:
        ops.biased_attention(q, k, v, tensor(draw, [b, h, m, n]), **options)
    else:
        options.pop("backend", None)
        ops.standard_attention(q, k, v, **options)


TWO = (
    "escalation_rate",
    "energy_ratios",
    "mixing_gains",
    "omega",
    "block_influence",
    "angular_distance",
    "kl_divergence",
)
PLAIN = ("token_similarity", "token_diversity", "token_cosine", "sample_cosine", "residual", "normalized_residual",
         "mixed_norm", "norm_1", "norm_inf", "effective_rank", "massive_tokens", "massive_channels",
         "robust_similarity", "massive_activations", "relative_length", "delta", "second_eigenvalue", "spectral_radius",
         "attention_entropy", "attention_received", "sink_share", "sink_weight")  # fmt: skip


def metric(draw: Draw, at: Path, samples: Path) -> None:
    """Metrics of shapes, dtypes and magnitudes of every kind."""
    b, n, d = (draw.choice([1, 2, 3, 5]) for _ in range(3))
    name = draw.choice(TWO + PLAIN)
    x, y = tensor(draw, [b, n, d]), tensor(draw, [b, n, d])
    square = tensor(draw, [b, n, n])
    if draw.random() < 0.5 and square.is_floating_point() and 0 not in square.shape:
        square = square.softmax(-1)
    function = getattr(metrics, name)
    if name in ("mixing_gains", "omega"):
        function(x, square)
    elif name in TWO:
        function(x, y)
    elif name in PLAIN[-7:]:
        function(square)
    elif draw.random() < 0.3 and "mask" in inspect.signature(function).parameters:
        function(x, mask=tensor(draw, [b, n]).real > 0)
    else:
        function(x)


def probe_and_cure(draw: Draw, at: Path, samples: Path) -> None:
    """Arguments of probe and cure that are of other types, out of range or do not fit the model."""
    torch.manual_seed(0)
    model = draw.choice([tiny_bert, tiny_vit, tiny_gpt2, lambda: torch.nn.Linear(4, 4), lambda: None])()
    ids = torch.randint(0, 20, (2, 6))
    inputs = draw.choice([
        ids, ids, torch.randn(2, 3, 16, 16), torch.randn(2, 6, 16), {"input_ids": ids}, [ids, ids], [], None, "x", {},
        torch.zeros(0, 6, dtype=torch.long), ids - 5, ids + 1000, {"x": ids}, ids.float(),
    ])  # fmt: skip
    if draw.random() < 0.6:
        names = ["alpha", "alpha_prime", "de_escalation", "layers", "de_escalation_at", "start"]
        fit = {"alpha": 0.5, "alpha_prime": 0.5, "de_escalation": 0.5, "layers": [0], "start": "scores"}
        options = {name: fit.get(name) if draw.random() < 0.4 else value(draw) for name in draw.sample(names, 2)}
        ll.cure(model, **options)
        if draw.random() < 0.5:
            ll.uncure(model)
        return
    names = ["blocks", "loss", "mask", "attention", "heatmaps", "trials", "prefix"]
    options = {name: value(draw) for name in draw.sample(names, draw.randint(0, 2))}
    report = ll.probe(model, inputs, **options)
    report.to_json()


def tiny_bert() -> Any:
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "vocab_size": 64,
    }
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, max_position_embeddings=32))


def tiny_gpt2() -> Any:
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 32}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def tiny_vit() -> Any:
    return ll.create_model("vit_tiny", depth=2, dim=16, heads=2, image_size=16, patch_size=8, num_classes=3)


AREAS: dict[str, Callable[[Draw, Path, Path], None]] = {
    "recipes": recipes,
    "yaml": yaml_text,
    "command line": command_line,
    "folders": folders,
    "reports": reports,
    "data": data,
    "operators": operators,
    "metrics": metric,
    "probe and cure": probe_and_cure,
}
SHARES = {"folders": 2, "command line": 2}  # the others 1


def make_samples(at: Path) -> None:
    """Write small models, runs, texts, images and a report."""
    at.mkdir()
    tiny_vit().save(at / "model")
    for name, model in (("gpt2", tiny_gpt2()), ("bert", tiny_bert())):
        model.save_pretrained(at / name)
    (at / "text").mkdir()
    words = " ".join(f"word{i % 50} and\n" if i % 7 else f"word{i}" for i in range(2000))
    (at / "text" / "train.txt").write_text(words)
    (at / "text" / "valid.txt").write_text(words[:3000])
    pq.write_table(pa.table({"text": words.splitlines()[:400]}), at / "text" / "test.parquet")
    quick = [
        "batch.size=16",
        "model.depth=2",
        "model.dim=16",
        "model.heads=2",
        "checkpoint.every=2 steps",
        "device=cpu",
    ]
    for name, base, more in (
        ("digits", "smoke_digits.yaml", ["watch.every=0", "schedule.warmup=1 steps"]),
        ("text", "smoke_text.yaml", [f"data.path={at / 'text'}", "data.tokens=16", f"data.cache={at / 'cache'}"]),
    ):
        recipe = load_recipe(RECIPES / base, [*quick, *more, "length=5 steps", "evaluate=5 steps"])
        (at / f"{name}.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
        out = at / ("run" if name == "digits" else "text_run")
        train(load_recipe(at / f"{name}.yaml", [f"out={out}"]), console=Console(quiet=True))
    tokenizer = json.loads((at / "text_run" / "tokenizer.json").read_text())
    (at / "gpt2" / "tokenizer.json").write_text(json.dumps(tokenizer))
    cure_folder(at / "gpt2", at / "cured", alpha=0.5)
    (at / "tiny.py").write_text(
        "import leadline as ll\ndef build():\n    return ll.create_model('vit_tiny', depth=2, dim=16, heads=2)\n"
    )
    pixels = np.random.default_rng(0).integers(0, 255, (8, 8, 3), dtype=np.uint8)
    rows: dict[str, list[Any]] = {"img": [], "label": []}
    for split in ("train", "test"):
        for i in range(4):
            folder = at / "images" / split / f"class{i % 2}"
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(folder / f"{i}.png")
            rows["img"].append({"bytes": (folder / f"{i}.png").read_bytes(), "path": None})
            rows["label"].append(i)
    (at / "cifar" / "plain_text").mkdir(parents=True)
    for split in ("train", "test"):
        pq.write_table(pa.table(rows), at / "cifar" / "plain_text" / f"{split}-00000-of-00001.parquet")
    ll.probe(tiny_bert(), torch.randint(0, 20, (2, 6)), heatmaps=True).save(at / "report.json")


def fingerprint(folder: Path) -> str:
    """A digest of the names and contents of all files in a folder."""
    total = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        if file.is_file() and "cache" not in file.parts:
            total.update(f"{file.relative_to(folder)} {digest(file)}\n".encode())
    return total.hexdigest()


# --- running the cases


@dataclass
class Case:
    """One case that runs: its process, when it began and where its files are."""

    area: str
    number: int
    process: int
    began: float
    folder: Path


def processor_time(process: int) -> float:
    """Return the seconds of processor time that a process has taken."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def begin(area: str, number: int, seed: int, samples: Path) -> Case:
    """Fork a process for a case."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    process = os.fork()
    if not process:
        _child(area, number, seed, samples, folder)
    return Case(area, number, process, time.monotonic(), folder)


def _child(area: str, number: int, seed: int, samples: Path, folder: Path) -> None:
    """Run a case and write its outcome into ``folder``; never returns."""
    os.setpgid(0, 0)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    work = folder / "work"
    work.mkdir()
    silent = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(silent, stream)
    code, kind, where = 1, "traceback", ""
    try:
        AREAS[area](Draw(f"{seed}-{area}-{number}"), work, samples)
        code, kind = 0, "result"
    except (LeadlineError, Stopped) as error:
        lines = str(error).splitlines()
        fine = len(lines) == 1 and len(lines[0]) < 2500
        code, kind, where = (0, "refused", "") if fine else (1, "message", str(error)[:300])
    except BaseException as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/leadline/" in frame.filename]
        last = frames[-1] if frames else None
        where = f"{type(error).__name__}: {str(error)[:300]}"
        where += f" at {Path(last.filename).name}:{last.lineno}" if last else ""
    (folder / "outcome.json").write_text(json.dumps([kind, where]))
    os._exit(code)


def end(case: Case, status: int, usage: resource.struct_rusage | None) -> tuple[str, str]:
    """Return the outcome of a case that has ended, and where it failed."""
    file = case.folder / "outcome.json"
    kind, where = json.loads(file.read_text()) if file.exists() else ("crash", f"status {status}")
    if usage is not None and usage.ru_maxrss * 1024 > MEMORY:
        kind = "memory"
    shutil.rmtree(case.folder, ignore_errors=True)
    return kind, where


def plan(cases: int, only: str | None) -> list[tuple[str, int]]:
    """List the areas and numbers of all cases, areas in turn."""
    areas = [only] if only else [area for area in AREAS for _ in range(SHARES.get(area, 1))]
    numbers: Counter[str] = Counter()
    planned = []
    for i in range(cases):
        area = areas[i % len(areas)]
        planned.append((area, numbers[area]))
        numbers[area] += 1
    return planned


def run(
    planned: list[tuple[str, int]],
    seed: int,
    jobs: int,
    samples: Path,
    bar: Callable[[], None],
    until: float = math.inf,
) -> dict[str, Any]:
    """Run the cases, ``jobs`` at a time, none begun after ``until``; return counts by area and the failures."""
    before = fingerprint(samples)
    counts: dict[str, Counter[str]] = {}
    failures: list[dict[str, Any]] = []
    waiting, running = list(reversed(planned)), []
    slowest = 0.0
    while waiting or running:
        if time.monotonic() > until:
            waiting.clear()
        while waiting and len(running) < jobs:
            running.append(begin(*waiting.pop(), seed, samples))
        time.sleep(0.002)
        for case in list(running):
            done, status, usage = os.wait4(case.process, os.WNOHANG)
            wall = time.monotonic() - case.began
            late = wall > PATIENCE or (wall > SECONDS and not done and processor_time(case.process) > SECONDS)
            if not done and not late:
                continue
            if not done:
                os.killpg(case.process, signal.SIGKILL)
                os.waitpid(case.process, 0)
                usage = None
            slowest = max(slowest, wall if usage is None else usage.ru_utime + usage.ru_stime)
            running.remove(case)
            kind, where = end(case, status, usage)
            kind = kind if done else "hang"
            counts.setdefault(case.area, Counter())[kind] += 1
            if kind not in ("result", "refused"):
                failures.append({"area": case.area, "number": case.number, "kind": kind, "where": where})
            bar()
    lost = fingerprint(samples) != before
    return {"areas": {area: dict(count) for area, count in sorted(counts.items())}, "failures": failures,
            "samples_changed": lost, "slowest_seconds": round(slowest, 1)}  # fmt: skip


def fuzz(
    cases: int, seed: int, area: str | None = None, only: int | None = None, jobs: int = 2, minutes: float = math.inf
) -> dict[str, Any]:
    """Run the fuzzer.

    Args:
        cases: Number of cases, over all areas.
        seed: Seed of the cases.
        area: One area alone.
        only: One case of that area alone.
        jobs: Number of processes.
        minutes: When to begin no more cases.

    Returns:
        Counts by area, and the failures.
    """
    planned = plan(cases, area) if only is None else [(area or "yaml", only)]
    home = Path(tempfile.mkdtemp(prefix="fuzz-samples-"))
    try:
        maker = os.fork()  # pyarrow starts threads, which a process that forks must not have
        if not maker:
            try:
                silent = os.open(os.devnull, os.O_RDWR)
                os.dup2(silent, 1)
                make_samples(home / "samples")
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        if os.waitpid(maker, 0)[1]:
            raise RuntimeError("the samples could not be made")
        began = time.monotonic()
        columns = (TextColumn("fuzzing"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as bars:
            task = bars.add_task("fuzzing", total=len(planned))
            result = run(planned, seed, jobs, home / "samples", lambda: bars.advance(task), began + 60 * minutes)
        seconds = round(time.monotonic() - began, 1)
        done = sum(sum(counts.values()) for counts in result["areas"].values())
        return {"cases": done, "seed": seed, "seconds": seconds, **result}
    finally:
        shutil.rmtree(home, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--area", choices=AREAS)
    parser.add_argument("--only", type=int, help="one case of an area, by its number")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no more cases after so long")
    parser.add_argument("--out", type=Path, help="file for the counts, JSON")
    given = parser.parse_args()
    result = fuzz(given.cases, given.seed, given.area, given.only, given.jobs, given.minutes)
    text = json.dumps(
        {**result, "environment": {**versions("transformers", "timm"), "hardware": processor()}}, indent=1
    )
    if given.out:
        given.out.write_text(text + "\n")
    print(text)
    sys.exit(bool(result["failures"] or result["samples_changed"]))


if __name__ == "__main__":
    main()
