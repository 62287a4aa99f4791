"""Where the hub cannot be reached, only our one line is said."""

import logging

import pytest

from leadline.data import hub
from leadline.data.images import cifar as vision
from leadline.data.images import sets
from leadline.data.text import files as text
from leadline.data.text import tokenizers as text_tokenizers
from leadline.errors import LeadlineError
from leadline.probing import open_model

datasets = pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")
client = logging.getLogger("huggingface_hub.utils._http")  # the one that tells of retries


def out_of_reach(*arguments, **options):
    client.warning("Retrying in 1s [Retry 1/5].")
    raise ConnectionError("Couldn't reach the hub")


@pytest.fixture
def said():
    """What the client's own logger has said, at the level it has by default."""
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("huggingface_hub")
    before = logger.level
    logger.setLevel(logging.WARNING)
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)
    logger.setLevel(before)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: vision.load_cifar10("test"), "CIFAR-10 is not on this machine"),
        (lambda: sets.HubRows(sets.LAYOUTS["cifar10"], "test"), "could not be downloaded"),
        (lambda: text.open_text(hub="Salesforce/wikitext"), "could not be downloaded"),
        (lambda: text_tokenizers.make_tokenizer("gpt2", []), "GPT-2's tokenizer is not on this machine"),
    ],
)
def test_only_our_line_is_said(call, message, said, monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", out_of_reach)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", out_of_reach)
    with pytest.raises(LeadlineError, match=message):
        call()
    assert said == []
    client.warning("of another call")
    assert [record.getMessage() for record in said] == ["of another call"]


def test_a_file_that_asks_the_hub_for_its_model(said, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import logging\n\ndef make():\n"
        "    logging.getLogger('huggingface_hub.utils._http').warning('Retrying')\n"
        "    raise OSError('no such model')\n"
    )
    with pytest.raises(LeadlineError, match=r"make in .*mine\.py failed: no such model"):
        open_model(f"{file}:make")
    assert said == []


def test_who_asks_for_more_gets_it(said):
    logger = logging.getLogger("huggingface_hub")
    logger.setLevel(logging.INFO)
    with hub.quiet_hub():
        client.warning("heard")
    assert logger.level == logging.INFO
    assert len(said) == 1
