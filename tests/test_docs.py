"""README and docs: every command parses, every link leads somewhere, every flag and metric exists, the walkthrough is current."""

import importlib.util
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def script(path):
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_walkthrough_is_what_its_script_writes():
    module = script("docs/make_walkthrough.py")
    data = json.loads((ROOT / "docs/walkthrough.json").read_text())
    assert module.page(data) == (ROOT / "docs/walkthrough.md").read_text()
    for sample, result in zip(data["samples"], module.score(data)):
        assert "".join(sample["tokens"]).removesuffix("<|end|>") == sample["text"]
        assert all(len(row) == len(sample["tokens"]) for row in sample["logprobs"])
        assert result["genrm_status"] == ("skipped" if sample["critique"] is None else "ok")
