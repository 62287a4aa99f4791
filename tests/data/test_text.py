"""Text from files and folders, tokenizers, and tokens kept on disk."""

import bz2
import gzip
import json
import lzma
import os
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import transformers

import leadline as ll
from leadline.data.made_once import made_once
from leadline.data.text import files as text_module
from leadline.data.text.files import count_words, open_text
from leadline.data.text.store import encode_text, tokenised, tokenizer_for
from leadline.data.text.tokenizers import (
    ByteTokenizer,
    PairTokenizer,
    WordTokenizer,
    load_tokenizer,
    make_tokenizer,
    save_tokenizer,
)

WIKI = " = Lead line = \n \n A lead line is a <unk> of rope , with a plummet of lead . \n Größe : 3 @-@ 4 m \n"
PROSE = "First line.\n\n    indented\nThe second  one, naïve – 水深.\r\nno end"


def whole(corpus, split):
    return "".join(corpus.blocks(split))


def test_reads_what_it_was_given_plain_or_compressed(tmp_path):
    for name, opened in (("a.txt", open), ("b.txt.xz", lzma.open), ("c.md.gz", gzip.open), ("d.rst.bz2", bz2.open)):
        with opened(tmp_path / name, "wb") as file:
            file.write(f"{name}\n{PROSE}\n".encode())
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    corpus = open_text(tmp_path)
    assert corpus.by_place
    want = "".join(f"{name}\n{PROSE}\n" for name in ("a.txt", "b.txt.xz", "c.md.gz", "d.rst.bz2"))
    assert whole(corpus, "train") + whole(corpus, "valid") + whole(corpus, "test") == want


def test_splits_by_name_of_file_or_folder(tmp_path):
    (tmp_path / "wiki.train.tokens").write_text("a\n")
    (tmp_path / "wiki.valid.tokens").write_text("b\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "notes.txt").write_text("c\n")
    corpus = open_text(tmp_path)
    assert corpus.splits == ["train", "valid", "test"]
    assert [whole(corpus, split) for split in corpus.splits] == ["a\n", "b\n", "c\n"]
    (tmp_path / "test" / "notes.txt").unlink()
    with pytest.raises(
        ll.LeadlineError, match=r"has no test text, only train \(.*train.tokens\), valid \(.*; give a f"
    ):
        open_text(tmp_path).blocks("test")


def test_beside_splits_a_file_without_one_is_not_read(tmp_path):
    """Else the test text would be trained on."""
    for name in ("wiki.valid.tokens", "wiki.test.tokens", "README.md", "LICENSE.txt"):
        (tmp_path / name).write_text(f"{name}\n")
    corpus = open_text(tmp_path)
    assert corpus.splits == ["valid", "test"]
    assert whole(corpus, "test") == "wiki.test.tokens\n"
    assert corpus.notice.endswith("are not: LICENSE.txt, README.md")
    with pytest.raises(ll.LeadlineError, match="has no train text, only valid"):
        corpus.blocks("train")
    (tmp_path / "README.md").unlink()
    (tmp_path / "LICENSE.txt").unlink()
    assert open_text(tmp_path).notice is None


@pytest.mark.parametrize(
    "name",
    ["ptb.char.{}.txt", "wikitext-103-{}.txt", "penn-treebank-{}.txt", "my_corpus_{}.txt", "{}_v2.md", "a.{}.en.txt.xz",
     "wikitext-103-{}-00000-of-00001.parquet", "{}2.{}.txt"],
)  # fmt: skip
def test_the_split_stands_in_many_places_of_a_name(tmp_path, name):
    for split in ("train", "valid", "test"):
        file = tmp_path / name.format(split, split)
        if file.suffix == ".parquet":
            pq.write_table(pa.table({"text": [split]}), file)
        else:
            with (lzma.open if file.suffix == ".xz" else open)(file, "wt") as stream:
                stream.write(f"{split}\n")
    corpus = open_text(tmp_path)
    assert [whole(corpus, split) for split in corpus.splits] == ["train\n", "valid\n", "test\n"]
    assert not corpus.by_place


def test_hidden_files_are_no_text(tmp_path):
    for name in ("train.txt", "valid.txt", "test.txt", ".notes.txt", ".ipynb_checkpoints/test-checkpoint.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{name}\n")
    corpus = open_text(tmp_path)
    assert [whole(corpus, split) for split in corpus.splits] == ["train.txt\n", "valid.txt\n", "test.txt\n"]
    assert corpus.notice is None
    hidden = tmp_path / ".ipynb_checkpoints"  # asked for by its name it is read
    assert whole(open_text(hidden), "test") == ".ipynb_checkpoints/test-checkpoint.txt\n"


def test_a_file_beside_its_packed_copy_is_refused(tmp_path):
    (tmp_path / "train.txt").write_text("a\n")
    (tmp_path / "train.md").write_text("b\n")
    open_text(tmp_path)
    with gzip.open(tmp_path / "train.txt.gz", "wt") as file:
        file.write("a\n")
    with pytest.raises(ll.LeadlineError, match=r"train.txt and train.txt.gz are one text twice by their names; remove"):
        open_text(tmp_path)


def test_a_shard_that_is_missing_is_told(tmp_path):
    for shard in (0, 2):
        pq.write_table(pa.table({"text": ["a"]}), tmp_path / f"train-0000{shard}-of-00003.parquet")
    with pytest.raises(ll.LeadlineError, match=r"has 2 of 3 train files by their names; give a whole copy"):
        open_text(tmp_path)
    pq.write_table(pa.table({"text": ["b"]}), tmp_path / "train-00001-of-00003.parquet")
    assert whole(open_text(tmp_path), "train") == "a\nb\na\n"


def test_parquet_of_the_hub_gives_the_text_of_the_files(tmp_path):
    """The hub's WikiText has a row a line, and empty rows for the lines that hold blanks alone."""
    rows = ["" if not line.strip() else f"{line}\n" for line in WIKI.removesuffix("\n").split("\n")]
    pq.write_table(pa.table({"text": rows}), tmp_path / "validation-00000-of-00001.parquet")
    corpus = open_text(tmp_path)
    assert corpus.splits == ["valid"]
    assert WordTokenizer.train([WIKI]).encode(whole(corpus, "valid")).tolist() == (
        WordTokenizer.train([WIKI]).encode(WIKI).tolist()
    )
    assert count_words(whole(corpus, "valid")) == count_words(WIKI)
    with pytest.raises(ll.LeadlineError, match=r"has the columns text; name the one with the text by data.column=NAME"):
        list(open_text(tmp_path, column="story").blocks("valid"))


def test_one_text_is_cut_by_place_at_lines(tmp_path):
    lines = [f"line {i}\n" for i in range(1000)]
    (tmp_path / "book.txt").write_text("".join(lines))
    corpus = open_text(tmp_path / "book.txt")
    parts = [whole(corpus, split).splitlines(keepends=True) for split in ("train", "valid", "test")]
    assert [line for part in parts for line in part] == lines
    assert [len(part) / 1000 for part in parts] == pytest.approx([0.9, 0.05, 0.05], abs=0.01)


@pytest.mark.parametrize(
    "text",
    ["ab c" * 250, "x" * 1000, "first line\n" + "word " * 300, "a\n" * 30 + "b" * 40],
    ids=["words", "no blank", "two lines", "long last line"],
)
def test_a_text_with_long_lines_is_cut_within_them(text, tmp_path, monkeypatch):
    monkeypatch.setattr(text_module, "BLOCK", 64)
    (tmp_path / "text8.txt").write_text(text)
    corpus = open_text(tmp_path / "text8.txt")
    parts = [whole(corpus, split) for split in corpus.splits]
    assert "".join(parts) == text
    assert [len(part) / len(text) for part in parts] == pytest.approx([0.9, 0.05, 0.05], abs=0.06)
    assert all(parts)


def test_a_cut_within_lines_is_between_words(tmp_path):
    words = [f"word{i}" for i in range(400)]
    (tmp_path / "book.txt").write_text("\t".join(words))
    corpus = open_text(tmp_path)
    assert [word for split in corpus.splits for word in whole(corpus, split).split()] == words


def test_a_file_begins_a_line(tmp_path):
    (tmp_path / "a.txt").write_text("no end")
    (tmp_path / "aa.txt").write_text("")
    (tmp_path / "b.txt").write_text("\ufeffwith a mark\n", encoding="utf-8")
    (tmp_path / "c.txt").write_text("last")
    corpus = open_text(tmp_path)
    assert "".join(whole(corpus, split) for split in corpus.splits) == "no end\nwith a mark\nlast"


@pytest.fixture
def small_blocks(tmp_path, monkeypatch):
    """The blocks of a text, of about 64 characters; they lose nothing."""

    def read(text):
        monkeypatch.setattr(text_module, "BLOCK", 64)
        (tmp_path / "train.txt").write_text(text)
        blocks = list(open_text(tmp_path).blocks("train"))
        assert "".join(blocks) == text
        return blocks

    return read


def test_one_long_line_is_read_in_blocks_of_whole_words(small_blocks):
    text = " ".join(f"word{i}" for i in range(500))
    blocks = small_blocks(text)
    assert max(map(len, blocks)) <= 128
    pairs = PairTokenizer.train([text], 300)
    assert np.concatenate([pairs.encode(block) for block in blocks]).tolist() == pairs.encode(text).tolist()


@pytest.mark.parametrize("blank", ["\t", "  ", "\u3000"])
def test_words_of_a_long_line_stay_whole_whatever_parts_them(blank, small_blocks):
    text = blank.join(f"word{i}" for i in range(500))
    blocks = small_blocks(text)
    assert max(map(len, blocks)) <= 128
    assert [word for block in blocks for word in block.split()] == text.split()
    pairs = PairTokenizer.train([text], 300)
    assert np.concatenate([pairs.encode(block) for block in blocks]).tolist() == pairs.encode(text).tolist()


def test_blocks_are_small_and_lose_nothing(small_blocks):
    blocks = small_blocks("".join(f"{'x' * (i % 13)} {i}\n{'' if i % 3 else chr(10)}" for i in range(200)))
    assert len(blocks) > 10
    assert max(map(len, blocks)) <= 3 * 64
    assert all(block.endswith("\n") for block in blocks)


def test_words_are_counted_as_in_wikitext():
    """What blanks separate, and each line's end: 217,646 words in its validation text, 245,569 in its test text."""
    assert count_words(WIKI) == sum(len(line.split()) + 1 for line in WIKI.splitlines())


def test_words_are_in_order_of_frequency_and_all_there():
    tokenizer = WordTokenizer.train([WIKI, "lead lead <unk> rope\n"])
    counts = {}
    for word in f"{WIKI}lead lead <unk> rope\n".replace("\n", " <eos> ").split():
        counts[word] = counts.get(word, 0) + 1
    assert [counts[word] for word in tokenizer.words] == sorted(counts.values(), reverse=True)
    assert set(tokenizer.words) == set(counts)
    ids = tokenizer.encode(WIKI)
    assert [tokenizer.words[i] for i in ids] == WIKI.replace("\n", " <eos> ").split()
    assert tokenizer.decode(ids).split() == WIKI.split()
    assert tokenizer.decode(ids).count("\n") == WIKI.count("\n")
    small = WordTokenizer.train([WIKI], vocab_size=5)
    assert small.vocab_size == 5
    assert {"<unk>", "<eos>"} <= set(small.words)
    assert tokenizer.words[tokenizer.encode("unheard-of")[0]] == "<unk>"
    assert WordTokenizer.train(["the the lead lead rope\n"], vocab_size=3).words == ["the", "<eos>", "<unk>"]


@pytest.mark.parametrize("make", [ByteTokenizer, lambda: PairTokenizer.train([PROSE * 20, WIKI * 20], 300)])
def test_bytes_and_pairs_give_back_every_text(make, tmp_path):
    tokenizer = make()
    for text in (PROSE, WIKI, "\n\n \t\n", "😀 unseen ÿ"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    save_tokenizer(tokenizer, tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.encode(PROSE).tolist() == tokenizer.encode(PROSE).tolist()
    assert again.vocab_size == tokenizer.vocab_size


def test_pairs_of_a_long_text_are_those_of_the_whole(monkeypatch):
    """A long text is cut into parts that are encoded at once, where no pair crosses."""
    text = "".join(
        f"Line {i} of the book, {'with more to say ' * (i % 5)}\n{chr(10) * (i % 3)}  x\n" for i in range(4000)
    )
    tokenizer = PairTokenizer.train([text], 600)
    assert len(text) > 4 << 14
    want = tokenizer.inner.encode(text).ids
    assert tokenizer.encode(text).tolist() == want


def test_a_tokenizer_of_transformers_is_read(tmp_path):
    tokenizer = PairTokenizer.train([PROSE * 20], 300)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.inner)
    fast.save_pretrained(tmp_path)
    assert make_tokenizer(str(tmp_path), ()).encode(PROSE).tolist() == fast(PROSE)["input_ids"]
    model = json.loads(tokenizer.to_json())["model"]
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    pairs = (pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"])
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(pairs))
    assert load_tokenizer(tmp_path).encode(PROSE).tolist() == fast(PROSE)["input_ids"]


def test_a_tokenizer_saved_with_truncation_and_padding_reads_all(tmp_path):
    """As a script leaves it that has cut its texts to a length."""
    tokenizer = PairTokenizer.train([PROSE * 20], 300)
    wanted = tokenizer.encode(PROSE * 3).tolist()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.inner, pad_token="<pad>")
    fast([PROSE], truncation=True, max_length=4, padding="max_length")
    fast.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "tokenizer.json").read_text())
    assert saved["truncation"]
    assert saved["padding"]
    assert load_tokenizer(tmp_path).encode(PROSE * 3).tolist() == wanted


def folder(tmp_path, text=WIKI):
    root = tmp_path / "data"
    root.mkdir(exist_ok=True)
    for split in ("train", "valid", "test"):
        (root / f"{split}.txt").write_text(f"{split} {text}")
    return root


@pytest.mark.parametrize("kind", ["byte", "word", "bpe"])
def test_tokens_are_made_once_and_mapped(kind, tmp_path, monkeypatch):
    corpus = open_text(folder(tmp_path))
    cache = tmp_path / "cache"
    tokenizer = tokenizer_for(corpus, kind, 300 if kind == "bpe" else None, cache)
    text = tokenised(corpus, "valid", tokenizer, cache)
    assert text.ids.tolist() == tokenizer.encode(f"valid {WIKI}").tolist()
    assert (text.sizes.bytes, text.sizes.words) == (len(f"valid {WIKI}".encode()), count_words(f"valid {WIKI}"))
    assert isinstance(text.ids, np.memmap)
    assert text.ids.dtype == np.uint16
    assert text.sizes.unknown == (1 if kind == "word" else 0)  # "valid" is not in the training text
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*.npy")}
    monkeypatch.setattr(type(tokenizer), "encode", None)  # nothing is encoded again
    assert tokenised(corpus, "valid", tokenizer_for(corpus, kind, 300 if kind == "bpe" else None, cache), cache)
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*.npy")} == before
    assert not list(cache.glob("*.part"))


@pytest.mark.parametrize("file", ["tokens.npy", "sizes.json", "tokenizer.json"])
@pytest.mark.parametrize("left", [None, 0, 10])
def test_a_damaged_cache_is_made_again(file, left, tmp_path):
    corpus, cache, found = open_text(folder(tmp_path)), tmp_path / "cache", []
    for _ in range(2):
        text = tokenised(corpus, "valid", tokenizer_for(corpus, "word", None, cache), cache)
        found.append((text.ids.tolist(), text.sizes))
        for path in list(cache.rglob(file)):
            content = path.read_bytes()
            path.unlink()  # the text above is mapped from it
            if left is not None:
                path.write_bytes(content[:left])
    assert found[0] == found[1]


def test_ids_with_gaps_are_stored_as_they_are(tmp_path):
    import tokenizers

    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 70000, "[UNK]": 1}, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = PairTokenizer(inner)
    assert tokenizer.vocab_size == 70001
    (tmp_path / "train.txt").write_text("a b b a z\n")
    found = tokenised(open_text(tmp_path), "train", tokenizer, tmp_path / "cache")
    assert np.array(found.ids).tolist() == [0, 70000, 70000, 0, 1]


def test_an_unknown_token_of_any_tokenizer_is_counted(tmp_path):
    import tokenizers

    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "lead": 1, "line": 2}, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert encode_text("lead line of lead", tokenizer).sizes.unknown == 1
    assert encode_text("lead line", tokenizer).sizes.unknown == 0
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "<unk>": 1, "line": 2}, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    assert encode_text("<unk> line <unk> lead", PairTokenizer(inner)).sizes.unknown == 1  # <unk> is a word to it
    pieces = tokenizers.Tokenizer(tokenizers.models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0))
    assert encode_text("aab", PairTokenizer(pieces)).sizes.unknown == 1


def test_files_that_look_like_text_are_told(tmp_path):
    for name in ("a.txt", "b.txt.zst", "picture.png"):
        (tmp_path / name).write_text("by the mark\n")
    notice = open_text(tmp_path).notice
    assert "not read, since they do not end in .txt" in notice
    assert notice.endswith(": b.txt.zst")


def test_changed_text_is_read_anew(tmp_path):
    root, cache = folder(tmp_path), tmp_path / "cache"
    first = tokenised(open_text(root), "train", ByteTokenizer(), cache).ids.tolist()
    folder(tmp_path, "other text\n")
    second = tokenised(open_text(root), "train", ByteTokenizer(), cache).ids
    assert second.tolist() != first
    assert bytes(second.tolist()) == b"train other text\n"


def test_a_failure_leaves_nothing_half_done(tmp_path):
    root, cache = folder(tmp_path), tmp_path / "cache"
    tokenizer = ByteTokenizer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ByteTokenizer, "encode", lambda self, text: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            tokenised(open_text(root), "train", tokenizer, cache)
    assert [path for path in cache.iterdir() if path.is_dir()] == []
    assert len(tokenised(open_text(root), "train", tokenizer, cache)) > 0


def test_text_at_hand(tmp_path):
    text = encode_text(PROSE, ByteTokenizer())
    assert (len(text), text.sizes.bytes) == (len(PROSE.encode()),) * 2


@pytest.mark.parametrize(
    ("call", "part"),
    [
        (lambda p: open_text(p / "nowhere"), "does not exist"),
        (lambda p: open_text(p), "holds no text; files must end in .txt"),
        (lambda p: open_text(), "give either the path"),
        (lambda p: list(open_text(write(p, "train.txt", b"\xff\xfe\x00")).blocks("train")), "is not UTF-8"),
        (lambda p: list(open_text(write(p, "train.txt.xz", b"no xz")).blocks("train")), "damaged or cut short"),
        (lambda p: list(open_text(write(p, "train.txt.gz", broken_gzip())).blocks("train")), "damaged or cut short"),
        (lambda p: list(open_text(write(p, "train.parquet", b"none")).blocks("train")), "cannot be read as parquet"),
        (
            lambda p: tokenised(open_text(torn_parquet(p)), "train", ByteTokenizer(), p / "c"),
            "train.parquet cannot be read as parquet (",
        ),
        (
            lambda p: tokenised(open_text(write(p, "train.txt", b"")), "train", ByteTokenizer(), p / "c"),
            "train.txt is empty",
        ),
        (
            lambda p: tokenised(open_text(write(p, "book.txt", b"few")), "valid", ByteTokenizer(), p / "c"),
            "book.txt is empty",
        ),
        (lambda p: list(open_text(table(p), column="number").blocks("train")), "column 'number' holds int and no text"),
        (lambda p: load_tokenizer(write(p, "tokenizer.json", b'{"leadline":"word"}')), "lacks its list of words"),
        (lambda p: load_tokenizer(write(p, "tokenizer.json", b"\xff")), "is not JSON"),
        (lambda p: WordTokenizer.train([PROSE], 2), "vocab_size is 2; <eos> and <unk> are two words of it, give 3"),
        (lambda p: tokenizer_for(open_text(write(p, "valid.txt", b"a")), "word", None, p / "c"), "no train text"),
        (lambda p: make_tokenizer("letters", ()), "unknown tokenizer 'letters'; allowed: byte, word, bpe, gpt2"),
        (lambda p: make_tokenizer(str(p), ()), "tokenizer.json does not exist"),
        (lambda p: load_tokenizer(write(p, "tokenizer.json", b"{")), "is not JSON"),
        (lambda p: load_tokenizer(write(p, "tokenizer.json", b"{}")), "is no tokenizer"),
        (lambda p: PairTokenizer.train([PROSE], 100), "byte pairs begin with 256 bytes"),
        (
            lambda p: tokenised(open_text(write(p, "train.txt", b"a")), "train", ByteTokenizer(), os.devnull),
            "tokens cannot be cached",
        ),
    ],
)
def test_bad_input_is_one_clear_line(call, part, tmp_path):
    with pytest.raises(ll.LeadlineError) as error:
        call(tmp_path)
    assert part in str(error.value)
    assert "\n" not in str(error.value)


def torn_parquet(folder):
    """Whose pages are not what was written."""
    file = folder / "train.parquet"
    pq.write_table(pa.table({"text": [f"{i * i % 9973} by the mark" for i in range(3000)]}), file, use_dictionary=False)
    content = bytearray(file.read_bytes())
    content[100 : len(content) // 2] = bytes(len(content) // 2 - 100)
    file.write_bytes(content)
    return file


def test_a_file_without_permission_is_named(tmp_path, monkeypatch):
    file = tmp_path / "train.txt"
    file.write_text("by the mark")
    corpus = open_text(file)
    refused = PermissionError(13, "Permission denied", str(file))
    monkeypatch.setattr(type(file), "open", lambda *_: (_ for _ in ()).throw(refused))
    with pytest.raises(ll.LeadlineError, match=r"train.txt cannot be read \(Permission denied\); give it read perm"):
        tokenised(corpus, "train", ByteTokenizer(), tmp_path / "c")


def test_a_blank_before_a_text_is_put_there_once():
    """RoBERTa's way; long texts are not cut for it."""
    text = "".join(f"{i} by the mark\n" for i in range(5000))
    inner = PairTokenizer.train([text], 300).inner
    inner.pre_tokenizer = type(inner.pre_tokenizer)(add_prefix_space=True)
    tokenizer = PairTokenizer(inner)
    assert tokenizer.encode(text).tolist() == inner.encode(text).ids
    assert tokenizer.unknown is None


def test_machines_without_a_common_lock_do_not_take_each_others_drafts(tmp_path, monkeypatch):
    """Two containers may have one process id."""
    monkeypatch.setattr("leadline.data.made_once.lock", lambda *_, **__: True)

    def slow(draft):
        (draft / "a").write_text("first")
        made_once("name", tmp_path, lambda other: (other / "a").write_text("second"), "things")
        assert (draft / "a").read_text() == "first"

    assert (made_once("name", tmp_path, slow, "things") / "a").read_text() == "first"


def broken_gzip():
    """Of which a few bytes in the middle were lost."""
    text = "".join(f"{i * i % 9973} by the mark {i}\n" for i in range(3000))
    content = bytearray(gzip.compress(text.encode(), mtime=0))
    middle = len(content) // 2
    content[middle : middle + 8] = b"\xff" * 8
    with pytest.raises(zlib.error):
        gzip.decompress(content)
    return bytes(content)


def table(folder):
    pq.write_table(pa.table({"text": ["a"], "number": [1]}), folder / "train.parquet")
    return folder


def write(folder, name, content):
    (folder / name).write_bytes(content)
    return folder / name


def test_the_hub_is_asked_by_datasets(monkeypatch, tmp_path):
    import datasets

    rows = {
        split: datasets.Dataset.from_dict({"text": [f"{split}\n", ""]}) for split in ("train", "validation", "test")
    }
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *names: (asked.append(names), datasets.DatasetDict(rows))[1])
    corpus = open_text(hub="Salesforce/wikitext", subset="wikitext-2-v1")
    assert asked == [("Salesforce/wikitext", "wikitext-2-v1")]
    assert whole(corpus, "valid") == "validation\n\n"
    assert tokenised(corpus, "test", ByteTokenizer(), tmp_path).ids.tobytes().replace(b"\0", b"") == b"test\n\n"
    del rows["test"]
    rows = {split: table.add_column("number", [1, 2]) for split, table in rows.items()}
    with pytest.raises(ll.LeadlineError, match=r"has no test text, only train, valid; write its parts to a folder as"):
        open_text(hub="some/set").check("test")
    with pytest.raises(ll.LeadlineError, match=r"the train text of some/set: column 'number' holds int and no text"):
        list(open_text(hub="some/set", column="number").blocks("train"))
    monkeypatch.setattr(datasets, "load_dataset", lambda *names: {"all": rows["train"]})
    with pytest.raises(ll.LeadlineError, match="has the splits all; train, validation and test are needed"):
        open_text(hub="some/set")
    monkeypatch.setattr(datasets, "load_dataset", lambda *names: (_ for _ in ()).throw(ConnectionError("no net")))
    with pytest.raises(ll.LeadlineError, match=r"could not be downloaded \(ConnectionError\); give a local copy"):
        open_text(hub="Salesforce/wikitext")


def test_gpt2s_tokenizer_where_it_is_and_one_clear_line_where_it_is_not(monkeypatch):
    inner = PairTokenizer.train([PROSE * 20], 300).inner
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=inner)

    def here(name, local_files_only, trust_remote_code):
        assert not trust_remote_code
        if local_files_only:
            raise OSError("not in the cache")
        return fast

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", here)
    assert make_tokenizer("gpt2", ()).encode(PROSE).tolist() == fast(PROSE)["input_ids"]
    monkeypatch.setattr(
        transformers.AutoTokenizer, "from_pretrained", lambda *a, **k: (_ for _ in ()).throw(OSError("no"))
    )
    with pytest.raises(ll.LeadlineError, match=r"could not be downloaded; give a folder that has it by data.tokenizer"):
        make_tokenizer("gpt2", ())
