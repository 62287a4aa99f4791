"""Reports are written whole or not at all, and those of other versions can be read."""

import json
import os

import pytest
from report_samples import bare
from report_samples import report as sample

from leadline.errors import LeadlineError
from leadline.report import DepthReport, Verdict, read_report


def report(model):
    return DepthReport(model, {}, [], Verdict("no collapse", "", {}, None, None, None))


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    file = tmp_path / "report.json"
    old, new = report("old"), report("new")
    old.save(str(file))
    content = file.read_bytes()

    def full(self, target=None, missing_ok=True):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", full)
        with pytest.raises(LeadlineError, match=r"cannot write .*report.json': No space left on device"):
            new.save(file)
        with monkeypatch.context() as read_only:
            read_only.setattr("pathlib.Path.unlink", full)
            with pytest.raises(LeadlineError, match=r"cannot write .*report.json': No space left on device"):
                new.save(file)
        for draft in tmp_path.glob("*.new"):
            draft.unlink()
    assert file.read_bytes() == content
    assert DepthReport.from_json(content.decode()) == old
    assert os.listdir(tmp_path) == ["report.json"]


def test_a_path_that_cannot_be_written_is_one_line(tmp_path):
    with pytest.raises(LeadlineError, match=r"no folder .*nowhere; create it first") as error:
        report("x").save(tmp_path / "nowhere" / "x.html")
    assert "\n" not in str(error.value)
    (tmp_path / "x.json").mkdir()
    with pytest.raises(LeadlineError, match="it is a folder"):
        report("x").save(tmp_path / "x.json")


def test_a_report_without_new_fields_or_with_unknown_ones_can_be_read(tmp_path):
    data = json.loads(sample(depth=2, heads=2).to_json())
    del data["heatmaps"], data["verdict"]["rank_collapse"], data["layers"][1]["gain"]
    data["later"] = data["layers"][0]["later"] = 1
    (tmp_path / "x.json").write_text(json.dumps(data))
    report = read_report(tmp_path / "x.json")
    assert report.heatmaps == []
    assert report.verdict.rank_collapse is False
    assert report.layers[1].gain is None
    assert report.layers[2] == sample(depth=2, heads=2).layers[2]


def test_what_is_not_finite_is_null_and_read_as_nan():
    text = bare().to_json()
    layer = json.loads(text)["layers"][1]
    assert layer["similarity"] is None
    assert layer["rate"] is None
    again = DepthReport.from_json(text)
    assert again.layers[1].similarity != again.layers[1].similarity
    assert again.layers[1].rate is None


def test_the_data_frame_and_the_csv_file_have_a_row_per_layer(tmp_path):
    whole = sample(depth=3)
    table = whole.to_dataframe()
    assert list(table.columns[:12]) == [
        "layer", "name", "similarity", "similarity_robust", "cosine", "diversity", "norm", "massive", "influence",
        "removal", "lens", "entropy",
    ]  # fmt: skip
    assert table["layer"].tolist() == [0, 1, 2, 3]
    assert table["removal"].isna().tolist() == [True, False, False, False]
    assert table["removal"][2] == whole.layers[2].removal
    assert table["massive"].tolist() == [0, 0, 0, 0.9]
    whole.save(tmp_path / "depth.csv")
    pandas = pytest.importorskip("pandas")
    read = pandas.read_csv(tmp_path / "depth.csv", float_precision="round_trip")
    pandas.testing.assert_frame_equal(read, table, check_exact=True, check_dtype=False)


def test_a_report_from_before_the_robust_figures_can_be_read():
    old = json.loads(sample("no collapse", depth=2).to_json())
    for name in ("depth_use",):
        del old[name]
    for layer in old["layers"]:
        for name in ("similarity_robust", "tokens", "influence", "massive_tokens", "removal"):
            del layer[name]
    old["verdict"]["redundant"] = [1]
    again = DepthReport.from_json(json.dumps(old))
    assert again.layers[1].similarity_robust is None
    assert again.verdict.redundant == [1]
