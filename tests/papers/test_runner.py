"""Running, storing, resuming and reporting, with entries that only these tests have."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from image_files import write_cifar
from rich.console import Console

from leadline.errors import LeadlineError
from leadline.papers.hop import table1 as hop_table1
from leadline.papers.shared import runner, store
from leadline.papers.shared.entry import Claim, Context, Entry, Result, above, below, first_above, within
from leadline.papers.shared.page import write_page
from leadline.papers.shared.plots import panels
from leadline.papers.shared.runner import Options


class Counter:
    """An entry that counts its runs."""

    def __init__(self, shape: bool = True, digits: bool = True) -> None:
        self.runs = 0
        self.shape, self.digits = shape, digits

    def __call__(self, context: Context) -> Result:
        self.runs += 1
        context.progress(1, 2)
        value = torch.rand(3, generator=context.generator())

        def plot() -> Any:
            figure, (axis,) = panels(1)
            axis.plot(value)
            return figure

        claims = [
            Claim("a | shape", "shape", 1.5, None, "above 1", self.shape),
            Claim("digits", "digits", None, 2.0, "10%", self.digits),
        ]
        return Result(claims, {"numbers": [{"i": i, "x": x} for i, x in enumerate(value.tolist())]}, plot, ["A note."])


def make(name: str = "one", **options: Any) -> tuple[Entry, Counter]:
    images = options.pop("images", False)
    counter = Counter(**options)
    return Entry(name, f"What {name} is", counter, {"size": 3}, images=images), counter


def run(entries: list[Entry], out: Path, ids: Any = "all", **options: Any) -> tuple[bool, str]:
    console = Console(file=io.StringIO(), width=160)
    holds = runner.run_entries(ids, out, entries, Options(device="cpu", console=console, **options))
    return holds, console.file.getvalue()  # type: ignore[attr-defined]


def test_what_a_run_leaves(tmp_path: Path) -> None:
    entry, _ = make()
    holds, output = run([entry], tmp_path)
    assert holds
    assert "1 of 1 shape claims hold" in output
    assert "A note." in output
    folder = tmp_path / "one"
    assert sorted(file.name for file in folder.iterdir()) == ["figure.png", "figure.svg", "numbers.csv", "summary.json"]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["id"] == "one"
    assert summary["setting"] == {"size": 3, "seed": 0, "device": "cpu"}
    assert summary["seconds"] >= 0
    assert summary["claims"][0] == {
        "name": "a | shape", "kind": "shape", "ours": 1.5, "paper": None, "tolerance": "above 1", "holds": True,
    }  # fmt: skip
    with (folder / "numbers.csv").open() as file:
        rows = list(csv.DictReader(file))
    expected = torch.rand(3, generator=torch.Generator().manual_seed(0))
    assert [float(row["x"]) for row in rows] == expected.tolist()


@pytest.mark.parametrize(("shape", "digits", "expected"), [(True, False, True), (False, True, False)])
def test_only_a_false_shape_fails(tmp_path: Path, shape: bool, digits: bool, expected: bool) -> None:
    entry, _ = make(shape=shape, digits=digits)
    assert run([entry], tmp_path)[0] is expected
    holds, output = run([entry], tmp_path)  # from the store
    assert holds is expected
    assert ("does not hold: one: a | shape" in output) is not expected


@pytest.mark.parametrize(
    ("kinds", "line"),
    [
        (["shape"], "\n1 of 1 shape claims hold. 1 entry, 0 s."),
        (["digits"], "\n1 of 1 digits are within their tolerance. 1 entry, 0 s."),
        ([], "\n1 entry, 0 s."),
    ],
)
def test_claims_that_there_are_none_of_are_not_counted(tmp_path: Path, kinds: list[str], line: str) -> None:
    entry, counter = make()

    def some(context: Context) -> Result:
        result = counter(context)
        return replace(result, claims=[claim for claim in result.claims if claim.kind in kinds])

    holds, output = run([replace(entry, run=some)], tmp_path)
    assert holds
    assert line in output
    assert "0 of 0" not in output


def test_finished_entries_are_not_run_again(tmp_path: Path) -> None:
    entry, counter = make()
    run([entry], tmp_path)
    _, output = run([entry], tmp_path)
    assert counter.runs == 1
    assert "finished before" in output
    run([entry], tmp_path, force=True)
    assert counter.runs == 2
    run([entry], tmp_path, seed=1)
    assert counter.runs == 3
    run([replace(entry, setting={"size": 4})], tmp_path, seed=1)
    assert counter.runs == 4


@pytest.mark.parametrize("damage", ["figure.png", "numbers.csv", "summary.json", "half", "{}"])
def test_what_is_not_whole_is_run_again(tmp_path: Path, damage: str) -> None:
    entry, counter = make()
    run([entry], tmp_path)
    summary = tmp_path / "one" / "summary.json"
    if damage == "half":
        summary.write_text(summary.read_text()[:100])
    elif damage == "{}":
        summary.write_text(damage)
    else:
        (tmp_path / "one" / damage).unlink()
    run([entry], tmp_path)
    assert counter.runs == 2


def test_interrupted_and_resumed(tmp_path: Path) -> None:
    """The first entry is kept, the second begins anew, and an old summary does not outlive a run that replaced it."""
    first, counted = make("first")
    second, _ = make("second")
    run([second], tmp_path)

    def interrupted(context: Context) -> Result:
        raise KeyboardInterrupt

    console = Console(file=io.StringIO(), width=160)
    entries = [first, replace(second, run=interrupted)]
    with pytest.raises(KeyboardInterrupt):
        runner.run_entries("all", tmp_path, entries, Options(seed=1, device="cpu", console=console))
    assert "the same command goes on" in console.file.getvalue()  # type: ignore[attr-defined]
    assert store.read(tmp_path / "second") is None
    run([first, second], tmp_path, seed=1)
    assert counted.runs == 1
    assert store.read(tmp_path / "second")["setting"]["seed"] == 1


def test_same_bytes_for_the_same_seed(tmp_path: Path) -> None:
    entry, _ = make()
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        run([entry], tmp_path / name, seed=seed)
    for file in ("numbers.csv", "figure.png", "figure.svg"):
        a, b, c = ((tmp_path / name / "one" / file).read_bytes() for name in "abc")
        assert a == b
        assert a != c


@pytest.mark.parametrize("threads", [1, 3])
def test_map_is_in_order_and_leaves_torch_as_it_was(threads: int) -> None:
    before, seen = torch.get_num_threads(), []
    torch.set_num_threads(threads)
    try:
        context = Context({}, 0, torch.device("cpu"), progress=lambda done, total: seen.append((done, total)))

        def work(item: int) -> tuple[int, bool, int]:
            return item * item, torch.is_grad_enabled(), torch.get_num_threads()

        assert context.map(work, range(5)) == [(item * item, False, 1) for item in range(5)]
        assert seen == [(done, 5) for done in range(1, 6)]
        with pytest.raises(ZeroDivisionError):
            context.map(lambda item: 1 // item, [1, 0, 2])
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_numbers_do_not_depend_on_threads(tmp_path: Path) -> None:
    """Nets are drawn from the one global generator, in whatever order the threads come to it."""
    setting = {**hop_table1.ENTRY.setting, "dim": 24, "image_size": 32, "patch_size": 16, "depth": 6, "count": 2}
    before, measured = torch.get_num_threads(), []
    try:
        for threads in (1, 4):
            torch.set_num_threads(threads)
            context = Context({**setting, "seeds": 2}, 0, torch.device("cpu"), embedded=True)
            measured.append(hop_table1.measure(context))
    finally:
        torch.set_num_threads(before)
    for key, values in measured[0].items():
        assert torch.equal(values, measured[1][key])


def test_streams_are_independent() -> None:
    context = Context({}, 7, torch.device("cpu"))
    draws = [torch.rand(4, generator=context.generator(stream)) for stream in (0, 0, 1)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert not torch.equal(draws[0], torch.rand(4, generator=Context({}, 8, torch.device("cpu")).generator()))


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise LeadlineError("CIFAR-10 is not on this machine; --data FOLDER")

    monkeypatch.setattr("leadline.papers.shared.material.load_cifar10", fail)
    monkeypatch.setattr("leadline.papers.shared.entry.load_cifar10", fail)


def test_without_cifar_the_others_run_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offline(monkeypatch)
    plain, counter = make("plain")
    needy, never = make("needy", images=True)
    with pytest.raises(LeadlineError, match="CIFAR-10 is not on this machine"):
        run([needy, plain], tmp_path)
    assert (counter.runs, never.runs) == (1, 0)
    with pytest.raises(LeadlineError, match="CIFAR-10"):
        run([needy], tmp_path)
    with pytest.raises(LeadlineError, match="CIFAR-10"):  # a bad --data stops at once
        run([needy, plain], tmp_path, data=tmp_path, force=True)
    assert counter.runs == 1


def test_embedded_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offline(monkeypatch)
    needy, counter = make("needy", images=True)
    _, output = run([needy], tmp_path, embedded=True)
    assert "scikit-learn's digits in place of CIFAR-10" in output
    summary = store.read(tmp_path / "needy")
    assert summary["setting"]["images"] == "scikit-learn digits"
    assert summary["notes"][0] == runner.EMBEDDED
    monkeypatch.undo()
    write_cifar(tmp_path / "cifar")
    run([needy], tmp_path, data=tmp_path / "cifar")  # another setting: not what was stored
    run([needy], tmp_path, data=tmp_path / "cifar")
    assert counter.runs == 2


def test_embedded_images() -> None:
    images = Context({}, 0, torch.device("cpu"), embedded=True).images(3, 16)
    assert images.shape == (3, 3, 16, 16)
    assert images.std() > 0.1


def test_choice_of_entries() -> None:
    entries = [make(name)[0] for name in ("a", "b")]
    entries.append(replace(make("c")[0], group="trained"))
    assert [entry.id for entry in runner.choose("init", entries)] == ["a", "b"]
    assert [entry.id for entry in runner.choose(["b", "init", "b"], entries)] == ["b", "a"]
    assert [entry.id for entry in runner.choose("all", entries)] == ["a", "b", "c"]
    with pytest.raises(LeadlineError, match="unknown entry 'd'; allowed: a, all, b, c, init, trained"):
        runner.choose("d", entries)


def test_bad_device_and_folder(tmp_path: Path) -> None:
    entry, counter = make()
    with pytest.raises(LeadlineError, match="device is 'nonsense'"):
        runner.run_entries("all", tmp_path, [entry], Options(device="nonsense"))
    (tmp_path / "file").write_text("")
    with pytest.raises(LeadlineError, match="cannot be made"):
        run([entry], tmp_path / "file")
    for page in (tmp_path, tmp_path / "file" / "page.md"):  # an error before anything has run
        with pytest.raises(LeadlineError, match="cannot be written"):
            run([entry], tmp_path / "out", page=page)
    assert counter.runs == 0


def test_claims() -> None:
    assert within("x", 1.04, 1.0, 0.05).holds
    assert not within("x", 1.06, 1.0, 0.05).holds
    assert within("x", -0.96, -1.0, 0.05).holds
    assert below("x", 0.9, 1.0).holds
    assert not below("x", 1.0, 1.0).holds
    assert not below("x", None, 1.0).holds
    assert above("x", 1.1, 1.0).kind == "shape"
    assert not above("x", None, 1.0).holds
    assert first_above([0.1, 0.5, 0.9], 0.4) == 2
    assert first_above([0.1], 0.4) is None
    with pytest.raises(LeadlineError, match="unknown kind 'colour'"):
        Claim("x", "colour", 1.0, None, "", True)
    with pytest.raises(LeadlineError, match="must be finite"):
        Claim("x", "shape", float("nan"), None, "", True)


def test_tables_that_find_no_room_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    entry, _ = make()
    with monkeypatch.context() as patch:

        def fill_the_disk(context: Context) -> Result:
            patch.setattr("os.replace", full)
            return entry.run(context)

        with pytest.raises(LeadlineError, match=r"one cannot be written \(No space left on device\); make room"):
            run([replace(entry, run=fill_the_disk)], tmp_path)
    assert store.read(tmp_path / "one") is None
    assert run([entry], tmp_path)[0]


def test_page(tmp_path: Path) -> None:
    good, _ = make("good")
    bad, _ = make("bad", shape=False)
    page = tmp_path / "docs" / "page.md"
    run([good, bad], tmp_path, page=page)
    text = page.read_text()
    assert "| [good](#good) | 1 of 1 | 1 of 1 |" in text
    assert "| [bad](#bad) | 0 of 1 | 1 of 1 |" in text
    assert "| a \\| shape | shape | 1.5 | - | above 1 | **no** |" in text
    assert "- A note." in text
    assert f"torch {torch.__version__}" in text
    assert str(tmp_path) not in text
    assert "`leadline reproduce init --device cpu --page page.md`" in text
    same = json.loads(page.with_suffix(".json").read_text())
    assert same["command"] in text
    assert [entry["id"] for entry in same["entries"]] == ["good", "bad"]
    assert same["entries"][1]["claims"] == json.loads((tmp_path / "bad" / "summary.json").read_text())["claims"]
    assert same["environments"] == [store.environment()]
    picture = page.parent / "init" / "good.png"
    assert picture.read_bytes() == (tmp_path / "good" / "figure.png").read_bytes()
    assert "Every figure and table of the two papers" in text
    write_page(tmp_path, page, ["good", "absent"])
    assert "`leadline reproduce good --page page.md`" in page.read_text()
    assert "Every figure" not in page.read_text()
    with pytest.raises(LeadlineError, match="no finished entry"):
        write_page(tmp_path / "none", page, ["good"])
