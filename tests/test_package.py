"""The wheel: what it carries, and that it works where neither verl nor Ray is."""

import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
SITE_PACKAGES = Path(sysconfig.get_path("purelib"))
# What the package declares, and what these need in turn; all else of the environment stays out of sight.
VISIBLE = (
    *("torch", "torchgen", "functorch", "tensordict", "numpy", "numpy.libs", "cloudpickle", "packaging", "orjson"),
    *("importlib_metadata", "zipp", "pyvers", "typing_extensions.py", "sympy", "mpmath", "networkx", "jinja2"),
    *("markupsafe", "fsspec", "filelock"),
)
BLOCKED = ("verl", "ray", "hydra", "omegaconf", "transformers", "trinity")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    # A copy, since setuptools leaves build folders in what it builds.
    source = folder / "source"
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, files.split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    # A source distribution, and the wheel from that.
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, source]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """The interpreter of an environment with the wheel, torch and tensordict, and without verl and Ray."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    installed = subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel], capture_output=True, text=True
    )
    assert installed.returncode == 0, installed.stderr
    visible = folder / "visible"
    visible.mkdir()
    for name in VISIBLE:
        (visible / name).symlink_to(SITE_PACKAGES / name)
    for metadata in SITE_PACKAGES.glob("*.dist-info"):
        if metadata.name.partition("-")[0].lower() in VISIBLE:
            (visible / metadata.name).symlink_to(metadata)
    (site,) = (folder / "venv" / "lib").glob("*/site-packages")
    (site / "visible.pth").write_text(f"{visible}\n")
    return python


def run(python, code, **options):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [python, "-c", code], capture_output=True, text=True, env=environment, cwd=python.parent, **options
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_the_wheel_carries(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "trinity_loss").rglob("*.py")}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert set(names) >= modules & set(tracked)
    assert {"trinity_loss/py.typed", "trinity_loss/verl/conf/trinity_loss.yaml"} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests/", "recipes/"))]


def test_it_declares_what_it_needs_and_its_hooks(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        said = archive.read(metadata).decode()
        hooks = archive.read(metadata.replace("METADATA", "entry_points.txt")).decode()
    needed = [line for line in said.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert {re.match(r"[\w-]+", line.split()[1])[0] for line in needed} == {"torch", "tensordict", "numpy"}
    assert "trinity-loss = trinity_loss.cli:main" in hooks
    assert "trinity_loss = trinity_loss.verl.plugin" in hooks


def test_it_works_without_verl_and_ray(python):
    code = """
import importlib.util, torch, trinity_loss
from trinity_loss import EnginePolicyLoss, LossConfig, TrinityPolicyLoss
from trinity_loss.invariance import assert_invariant
log_probs = torch.full((2, 3), -1.0, requires_grad=True)
data = {"response_mask": torch.tensor([[1, 1, 1], [1, 0, 0]]), "old_log_probs": log_probs.detach(),
        "advantages": torch.tensor([[1.0], [-1.0]])}
loss, _ = TrinityPolicyLoss(LossConfig())(model_output={"log_probs": log_probs}, data=data)
loss.backward()
print(trinity_loss.__file__, float(loss))
totals = {"batch_num_tokens": 8, "global_batch_size": 4, "dp_size": 1}
share, metrics = EnginePolicyLoss(LossConfig())(model_output={"log_probs": log_probs}, data=data | totals)
print(float(share) == float(loss) / 2, metrics["actor/pg_loss"].aggregate() == float(share))
"""
    code += f"print([name for name in {BLOCKED} if importlib.util.find_spec(name)])\n"
    said = run(python, code).splitlines()
    assert said[0].startswith(str(python.parent.parent))
    assert said[1] == "True True"
    assert said[2] == "[]"


def test_its_hydra_fragment_composes_where_it_is_installed(python, tmp_path):
    for name in ("hydra", "omegaconf", "antlr4", "yaml"):
        (tmp_path / name).symlink_to(SITE_PACKAGES / name)
    (tmp_path / "config.yaml").write_text(
        "hydra: {searchpath: ['pkg://trinity_loss.verl.conf']}\ndefaults: [trinity_loss, _self_]\n"
    )
    code = f"""
import sys
sys.path.append({str(tmp_path)!r})
from hydra import compose, initialize_config_dir
with initialize_config_dir({str(tmp_path)!r}, version_base=None):
    print(compose("config").actor_rollout_ref.actor.policy_loss._target_)
"""
    assert run(python, code).strip() == "trinity_loss.verl.PolicyLossConfig"


def test_the_command_is_there(python):
    done = subprocess.run([python.parent / "trinity-loss", "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "verify" in done.stdout
    done = subprocess.run([python.parent / "trinity-loss", "verify"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "pip install 'trinity-loss[verl]'" in done.stderr


def test_type_information_reaches_a_user(python, tmp_path):
    user = tmp_path / "user.py"
    user.write_text("from trinity_loss import LossConfig\nreveal_type(LossConfig().clip_ratio)\nLossConfig(clip=1)\n")
    options = ["--python-executable", python, "--follow-imports=silent", "--ignore-missing-imports"]
    options += ["--cache-dir", tmp_path / "cache"]
    said = subprocess.run([sys.executable, "-m", "mypy", *options, user], capture_output=True, text=True, cwd=tmp_path)
    assert 'Revealed type is "float"' in said.stdout
    assert 'Unexpected keyword argument "clip"' in said.stdout
