"""verl is still what this package leans on, and another version of it is said to be one."""

import ast
import importlib
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import trinity_loss
from trinity_loss.errors import ConfigError
from trinity_loss.jagged import is_jagged, jagged_parts
from trinity_loss.verl import compat

PACKAGE = Path(trinity_loss.__file__).parent


def imported_from_verl():
    """Every name that a file of ours imports from verl, whether at its head or late."""
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "verl":
                for alias in node.names:
                    yield str(file.relative_to(PACKAGE)), node.module, alias.name


@pytest.mark.parametrize("point", compat.POINTS, ids=lambda point: f"{point.where}-{point.used_by}")
def test_a_point_is_where_it_was(point):
    assert (PACKAGE / point.used_by).is_file()
    assert point.problem() is None


@pytest.mark.parametrize(("file", "module", "name"), sorted(set(imported_from_verl())))
def test_what_a_file_imports_is_there(file, module, name):
    if module == "verl.utils.megatron_utils":
        pytest.importorskip("megatron.core")
    said = what_is_missing(module, name)
    assert said is None, f"{file}: {said}"


def what_is_missing(module, name):
    """A sentence if a module has no such name, and there is no module of that name in it."""
    try:
        if not hasattr(importlib.import_module(module), name):
            importlib.import_module(f"{module}.{name}")
    except ImportError as error:
        return f"verl has no {module}:{name} any more ({error})"
    return None


@pytest.mark.parametrize("module", ["verl.gone", "verl.gone.too", "verl.utils"])
def test_a_module_that_moved_is_said_in_a_sentence(module):
    assert what_is_missing(module, "gone").startswith(f"verl has no {module}:gone any more (No module named ")


@pytest.mark.parametrize(
    ("where", "has", "says"),
    [
        ("verl.workers.engine_workers:TrainingWorker.gone", (), r"no .*gone any more, which trinity_loss/a\.py uses"),
        ("verl.gone:TrainingWorker", (), r"no verl\.gone:TrainingWorker any more"),
        ("verl.workers.utils.losses:ppo_loss", ("config", "batch"), r"ppo_loss has no batch; .*expects config, batch"),
        (
            "verl.workers.utils.losses:ppo_loss",
            ("data", "config"),
            r"takes its arguments as config, model_output, data",
        ),
        ("verl.workers.config:ActorConfig", ("loss_mode",), r"ActorConfig has no loss_mode"),
        ("verl.utils.metric:AggregationType", ("MEDIAN",), r"AggregationType has no MEDIAN"),
    ],
)
def test_what_moved_is_said_in_a_sentence(where, has, says):
    said = compat.Point(where, "a.py", has).problem()
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(said)


def test_a_key_that_is_not_written_any_more_is_said_in_a_sentence():
    point = compat.Point("verl.workers.utils.losses:ppo_loss", "a.py", says=("dp_size", "batch_num_words"))
    assert point.problem() == (
        "verl's verl.workers.utils.losses:ppo_loss says nothing of batch_num_words any more, which "
        "trinity_loss/a.py relies on"
    )


def test_what_is_not_installed_is_not_leaned_on():
    assert compat.Point("verl.gone:gone", "a.py", needs="megatron_of_nobody").problem() is None


def test_verl_itself_is_always_needed(monkeypatch):
    monkeypatch.setitem(sys.modules, "verl", None)
    said = compat.Point("verl:DataProto", "a.py").problem()
    assert said is not None
    assert said.startswith("verl has no verl:DataProto any more")


def test_another_version_is_named(monkeypatch):
    monkeypatch.setattr(compat, "version", lambda _: "1.0.0")
    with pytest.warns(UserWarning, match=r"tested beside verl 0\.9\.0 and 0\.9\.1; this is verl 1\.0\.0"):
        compat.warn_if_untested()


def test_the_tested_version_is_the_installed_and_the_pinned_one():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compat.warn_if_untested()
    assert '"verl>=0.9.0,<0.9.2"' in (PACKAGE.parent / "pyproject.toml").read_text()
    assert f"verl=={compat.TESTED[-1]}\n" in (PACKAGE.parent / "requirements" / "constraints.txt").read_text()


@pytest.mark.parametrize("old", ["0.8.0", "0.7.1.dev0"])
def test_an_old_version_is_refused_in_one_sentence(old, monkeypatch):
    """Where a configuration names the class, and where a worker would look for verl's place."""
    monkeypatch.setattr(compat, "version", lambda _: old)
    import trinity_loss.verl

    for ask in (lambda: trinity_loss.verl.PolicyLossConfig, compat.check_version):
        with pytest.raises(ConfigError, match=rf"^verl {old} is too old: trinity_loss needs verl 0\.9\.0 or later$"):
            ask()


def test_the_adapter_warns_once_where_it_is_imported():
    code = (
        "import importlib.metadata as m, warnings; real = m.version\n"
        "m.version = lambda name: '1.0.0' if name == 'verl' else real(name)\n"
        "from trinity_loss.verl import PolicyLossConfig\n"
        "PolicyLossConfig(); PolicyLossConfig()\n"
        "import trinity_loss.verl.policy_loss_config\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr
    assert said.count("tested beside verl 0.9.0 and 0.9.1; this is verl 1.0.0") == 1


def test_what_moved_in_torch_is_said_to_be_torchs():
    point = compat.Point("torch.nested._internal.nested_tensor:NestedTensor", "jagged.py", ("_gone",))
    assert point.problem() == (
        "torch's torch.nested._internal.nested_tensor:NestedTensor has no _gone; trinity_loss/jagged.py expects _gone"
    )


def test_a_jagged_tensor_keeps_its_parts_where_we_read_them():
    jagged = torch.nested.nested_tensor_from_jagged(torch.arange(3.0), offsets=torch.tensor([0, 2, 3]))
    values, offsets = jagged_parts(jagged)
    assert values is jagged._values
    assert torch.equal(values, jagged.values())
    assert torch.equal(offsets, jagged.offsets())
    assert is_jagged(jagged)
    assert not is_jagged(torch.zeros(1))
