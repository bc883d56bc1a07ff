"""What the README and the documents show: Python that runs, commands and overrides that there are."""

import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path

import pytest

from trinity_loss import LossConfig, cli
from trinity_loss.aggregation import aggregation_mode_names, find_aggregation_mode
from trinity_loss.registry import CLIP_ARGUMENTS, get_policy_loss, policy_loss_names
from trinity_loss.totals import Count, GroupCount, count_names, find_count
from trinity_loss.trial import try_policy_loss

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TARGET = "actor_rollout_ref.actor.policy_loss._target_=trinity_loss.verl.PolicyLossConfig"

#: What a reader does next with what a document defines.
AFTERWARDS = {
    "README.md": "assert float(loss) == 0 and pg_loss == 0, (loss, pg_loss)",
    "bring-a-loss.md": """
from trinity_loss.losses_by_name import candidates
from trinity_loss.invariance import check_invariance
from trinity_loss.verl.composed import compose

for spec in ("my_package.my_module:my_loss", "my_package.my_policy_losses:my_policy_loss"):
    (make,) = candidates(spec, compose(None, "ppo_trainer", []))
    report = check_invariance(make().loss_fn)
    assert report.ok and "nothing is known" not in report.sentence, str(report)
""",
    "losses.md": """
from trinity_loss import LossConfig

assert LossConfig(loss_mode="my_package.my_losses:reinforce", loss_args={"baseline": 0.5}).policy_loss.fields
""",
    "trinity-rft.md": "",
    "modes.md": """
from trinity_loss import EnginePolicyLoss, LossConfig
from trinity_loss.invariance import assert_invariant

assert_invariant(EnginePolicyLoss(LossConfig(loss_agg_mode="my-sqrt-length-mean")))
""",
    "totals.md": """
from trinity_loss import EnginePolicyLoss, LossConfig
from trinity_loss.invariance import assert_invariant

assert_invariant(EnginePolicyLoss(LossConfig(loss_agg_mode="my-long-mean")))
""",
}


def blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", document.read_text(), re.DOTALL | re.MULTILINE)


def test_every_document_with_python_is_tried():
    assert {d.name for d in DOCUMENTS if blocks(d, "python")} == set(AFTERWARDS)


@pytest.mark.parametrize("name", AFTERWARDS)
def test_python_runs(name, tmp_path):
    """In a process of its own, since it registers names; a block that begins with a file's name is in that file."""
    (document,) = (d for d in DOCUMENTS if d.name == name)
    script = []
    for block in blocks(document, "python"):
        if file := re.match(r"# (\S+\.py)\n", block):
            path = tmp_path / file[1]
            path.parent.mkdir(exist_ok=True)
            path.write_text(block)
            script.append(f"import {file[1].removesuffix('.py').replace('/', '.')}\n")
        else:
            script.append(block)
    (tmp_path / "script.py").write_text("\n".join([*script, AFTERWARDS[name]]))
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def table(document: str, head: str) -> list[list[str]]:
    """The rows of a document's table whose first column has that head, cell by cell."""
    _, _, rest = (ROOT / document).read_text().partition(f"| {head} |")
    rows = rest.split("\n\n")[0].splitlines()[2:]
    assert rows, f"{document} has no table with {head}"
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row.strip("|"))] for row in rows]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def first_column(document: str, head: str) -> list[str]:
    return [name for row in table(document, head) for name in names(row[0])]


def built_in(known: Iterable[str], module_of: Callable[[str], str]) -> list[str]:
    """Those that are the package's own: tests register others."""
    return [name for name in known if module_of(name).startswith("trinity_loss")]


LOSSES = built_in(policy_loss_names(), lambda name: get_policy_loss(name).fn.__module__)


def test_every_mode_has_a_row():
    modes = built_in(aggregation_mode_names(), lambda name: find_aggregation_mode(name).__module__)
    assert first_column("docs/modes.md", "`loss_agg_mode`") == modes
    assert first_column("README.md", "`loss_agg_mode`") == modes


def test_every_count_has_a_row():
    counts = [find_count(name) for name in count_names()]
    ours = {
        c.name for c in counts if getattr(c, "of_rows", getattr(c, "keys", c.__class__)).__module__ == Count.__module__
    }
    per_row = {c.per_row for c in counts if isinstance(c, GroupCount) and c.name in ours}
    assert set(first_column("docs/totals.md", "total")) == ours | per_row | {"dp_size"}


def test_every_loss_has_a_row_with_its_arguments():
    rows = {name: row[2] for row in table("docs/losses.md", "`loss_mode`") for name in names(row[0])}
    assert rows.keys() == set(LOSSES)
    for name, said in rows.items():
        own = set(get_policy_loss(name).arguments) - set(CLIP_ARGUMENTS)
        if not said.startswith(("Trinity-RFT's", "verl's")):
            assert own <= set(names(said)), f"{name} takes {sorted(own)}"


@pytest.mark.parametrize("name", LOSSES)
def test_every_metric_of_a_loss_has_a_row(name):
    documented = first_column("docs/losses.md", "key")
    loss = get_policy_loss(name)
    config = LossConfig(loss_mode=name, loss_args={"dro_beta": 0.1} if name == "dro" else {})
    for result in try_policy_loss(name, loss, config.policy_arguments):
        assert {*result.means, *result.maxima, *result.minima} <= set(documented)


def test_every_option_of_the_loss_is_named():
    named = {word for document in DOCUMENTS for word in re.findall(r"\w+", document.read_text())}
    assert {field.name for field in fields(LossConfig)} <= named


def lines(document: Path) -> list[list[str]]:
    """The words of every command, whether it goes over several lines or not."""
    joined = "\n".join(blocks(document, "bash")).replace("\\\n", " ")
    return [words for line in joined.splitlines() if (words := shlex.split(line, comments=True))]


def inline(document: Path) -> list[list[str]]:
    return [shlex.split(text) for text in re.findall(r"`((?:make|trinity-loss) [^`|]*)`", document.read_text())]


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if lines(d) or inline(d)], ids=lambda d: d.name)
def test_commands_are_there(document):
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for words in [*lines(document), *inline(document)]:
        if words[0] == "make":
            wanted = [word for word in words[1:] if "=" not in word]
            assert set(wanted) <= set(targets), words
        elif words[0] == "trinity-loss" and words[1:]:
            _, rest = cli._parser().parse_known_args([word for word in words[1:] if word != "..."])
            assert not [word for word in rest if word.startswith("--")], words
        elif words[:2] == ["python", "-m"]:
            assert words[2].partition(".")[0] in ("verl", "trinity_loss", "pytest", "trinity"), words
        elif words[0] == "python":
            assert (ROOT / words[1]).is_file(), words


def overrides(document: Path) -> list[str]:
    return [word for words in lines(document) for word in words if re.match(r"\+?actor_rollout_ref\.[\w.]+=", word)]


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if overrides(d)], ids=lambda d: d.name)
def test_overrides_compose_and_make_an_actor(document):
    from trinity_loss.verl.composed import actor_config, compose

    for override in dict.fromkeys(overrides(document)):
        needed = ["actor_rollout_ref.actor.loss_scale_factor=8"]
        needed += [f"+actor_rollout_ref.actor.policy_loss.{name}_dir=/tmp" for name in ("record", "audit")]
        needed = [word for word in needed if word.split("=")[0].lstrip("+") not in override]
        actor_config(compose(None, "ppo_trainer", [*dict.fromkeys([TARGET, *needed, override])]))
