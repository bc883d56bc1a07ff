"""One rule for each kind of value, one look-up of places: what passes and what does not, in words."""

import numpy as np
import pytest
import torch

from trinity_loss.errors import ConfigError
from trinity_loss.import_path import find_at
from trinity_loss.rules import BOOLEAN, COUNT, NOT_NEGATIVE, NUMBER, POSITIVE, TEXT, check, list_of, one_of, optional

NAN, INF = float("nan"), float("inf")
NO_NUMBERS = [None, True, "1", "", [1], (1,), {}, NAN, INF, -INF, 10**400, 1j, torch.tensor(1.0), np.ones(2)]


@pytest.mark.parametrize(
    ("rule", "good", "bad"),
    [
        (NUMBER, [0, -1, 2.5, np.float32(1), np.int64(3)], NO_NUMBERS),
        (POSITIVE, [1, 1e-30], [0, 0.0, -1, *NO_NUMBERS]),
        (NOT_NEGATIVE, [0, 0.0, 3], [-1e-30, *NO_NUMBERS]),
        (COUNT, [0, 7, np.int64(3)], [-1, 1.0, *NO_NUMBERS]),
        (BOOLEAN, [True, False], [0, 1, None, "no", "true", np.bool_(True)]),
        (TEXT, ["a"], ["", None, 1, ["a"]]),
        (one_of("a", None), ["a", None], ["b", "", 0, ["a"], np.array(["a", "b"])]),
        (optional(COUNT), [None, 2], [-1, "2"]),
        (list_of(COUNT), [[], [1, 2], (3,)], ["[1]", "12", b"12", [1, -1], ["1"], {1: 2}, 3, None]),
    ],
)
def test_rules(rule, good, bad):
    for value in good:
        check("x", value, rule)
    for value in bad:
        with pytest.raises(ConfigError, match=r"(?s)^x is .*; expected "):
            check("x", value, rule)


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("collections", "expected package.module:name"),
        ("collections:", "expected package.module:name"),
        (":name", "expected package.module:name"),
        (".relative:name", "expected package.module:name"),
        ("collections:a:b", "expected package.module:name"),
        ("collections:Ordered Dict", "expected package.module:name"),
        ("no_such_module:x", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("collections:nobody", "has no attribute 'nobody'"),
        ("collections:OrderedDict.nobody", "has no attribute 'nobody'"),
        ("half_written:x", "SyntaxError"),
        ("breaks_at_import:x", "ZeroDivisionError: division by zero"),
    ],
)
def test_places_where_nothing_stands(place, says, tmp_path, monkeypatch):
    (tmp_path / "half_written.py").write_text("def x(:\n")
    (tmp_path / "breaks_at_import.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=f"^loss_mode is '{place}'.*{says}"):
        find_at("loss_mode", place)
