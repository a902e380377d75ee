"""The tensor dictionary of an episode: its contract, its conversion to numpy, and joining several (AREAL-WF-11 to 19)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from agrpo.errors import ContractError

REQUIRED = ("input_ids", "attention_mask")
TRAINED = ("loss_mask", "logprobs")  # what training needs besides
PER_TOKEN = {
    "input_ids": np.int32,
    "attention_mask": np.bool_,
    "loss_mask": np.bool_,
    "logprobs": np.float32,
    "versions": np.int32,
}
REFERENCE = "rollout_reward"


def arrays_of(name: str, result: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The fields as arrays, and what is no tensor. ContractError names the field, what is expected and what was found."""
    missing = [key for key in (*REQUIRED, *TRAINED) if result.get(key) is None]
    if missing:
        raise ContractError(
            f"{name}: the result lacks {' and '.join(missing)}, which training needs; it has {_keys(result)}"
        )
    arrays = {key: array for key, value in result.items() if (array := _array(value)) is not None}
    others = {key: value for key, value in result.items() if key not in arrays}
    for key in (*PER_TOKEN, "rewards"):
        if key in others and others[key] is not None:
            raise ContractError(f"{name}: {key} must be a tensor or an array, got {type(others[key]).__name__}")
    shape = arrays["input_ids"].shape
    if len(shape) != 2 or 0 in shape:
        raise ContractError(f"{name}: input_ids must have the shape [rows, tokens], both at least 1, got {list(shape)}")
    for key, dtype in PER_TOKEN.items():
        if key in arrays:
            arrays[key] = _per_token(name, key, arrays[key], dtype, shape)
    if "rewards" in arrays:
        arrays["rewards"] = _rewards(name, arrays["rewards"], shape[0])
    return arrays, others


def _array(value: Any) -> np.ndarray | None:
    if hasattr(value, "detach"):  # a torch tensor, without importing torch
        value = value.detach().cpu()
        value = value.float() if str(value.dtype) in ("torch.bfloat16", "torch.float16") else value
        return value.numpy()
    return value if isinstance(value, np.ndarray) else None


def _per_token(name: str, key: str, array: np.ndarray, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
    if array.shape != shape:
        raise ContractError(f"{name}: {key} must have the shape {list(shape)} of input_ids, got {list(array.shape)}")
    kinds, words = ("f", "a floating-point type") if dtype is np.float32 else ("iub", "an integer or boolean type")
    if array.dtype.kind not in kinds:
        raise ContractError(f"{name}: {key} must have {words}, expected {_expected(key)}, got {array.dtype}")
    return array.astype(bool if dtype is np.bool_ else dtype, copy=False)


def _expected(key: str) -> str:
    return {"attention_mask": "bool", "logprobs": "float32"}.get(key, "int32")


def _rewards(name: str, array: np.ndarray, num_rows: int) -> np.ndarray:
    if array.shape != (num_rows,):
        raise ContractError(f"{name}: rewards must have the shape [{num_rows}], one per row, got {list(array.shape)}")
    if array.dtype.kind not in "fiu":
        raise ContractError(f"{name}: rewards must have a floating-point type, expected float32, got {array.dtype}")
    if not np.isfinite(array).all():
        raise ContractError(f"{name}: rewards must be finite, got {_listed(array)}")
    return array.astype(np.float64)


def reference_of(name: str, value: Any) -> float | None:
    """The explicit reference reward as a number: a scalar, or one value for all rows (AREAL-WF-51)."""
    if value is None:
        return None
    array = np.asarray(_array(value) if _array(value) is not None else value)
    if array.dtype.kind not in "fiu" or array.size == 0:
        raise ContractError(f"{name}: {REFERENCE} must be a finite number, got {value!r}")
    if not np.isfinite(array).all():
        raise ContractError(f"{name}: {REFERENCE} must be a finite number, got {_listed(array.reshape(-1))}")
    return agreed(name, [float(v) for v in array.reshape(-1)])


def agreed(name: str, references: list[float]) -> float | None:
    """The one value of all stated references of an episode; None if there is none."""
    if not references:
        return None
    if any(not math.isfinite(r) for r in references) or len(set(references)) > 1:
        shown = ", ".join(f"{r:g}" for r in references)
        raise ContractError(f"{name}: all values of {REFERENCE} of one episode must be finite and equal, got {shown}")
    return references[0]


def reference_and_offsets(name: str, rows: np.ndarray, explicit: float | None) -> tuple[float, np.ndarray]:
    """The reward of the episode and what each row's reward differs from it by; `rows` [rows] float64."""
    if explicit is None and np.ptp(rows) > 0:
        raise ContractError(
            f"{name}: the rows of one episode have different rewards ({_listed(rows)}); supply an explicit {REFERENCE}, the "
            "reward that the episode is compared with others by"
        )
    reference = float(rows[0]) if explicit is None else explicit
    return reference, rows - reference


def check_values(name: str, arrays: dict[str, np.ndarray], given: Mapping[str, Any]) -> None:
    """Masks of 0 and 1, right padding, nothing trained outside of the attended tokens, and extras with one entry per row."""
    shape = arrays["input_ids"].shape
    for key in ("attention_mask", "loss_mask"):
        raw = _array(given[key])
        if raw.dtype.kind != "b" and not np.isin(raw, (0, 1)).all():
            raise ContractError(f"{name}: {key} must hold only 0 and 1, got {_listed(np.unique(raw)[:7])}")
    attended, trained = arrays["attention_mask"], arrays["loss_mask"]
    if (attended[:, 1:] & ~attended[:, :-1]).any():
        raise ContractError(f"{name}: attention_mask must be 1 up to the last token and 0 after it (right padding)")
    if (trained & ~attended).any():
        raise ContractError(f"{name}: loss_mask must be 0 where attention_mask is 0")
    if (arrays["input_ids"][attended] < 0).any():
        raise ContractError(f"{name}: input_ids must not be negative")
    if (arrays["logprobs"][trained] > 1e-3).any():
        raise ContractError(f"{name}: logprobs must not be above 0, got {arrays['logprobs'][trained].max():g}")
    for key, array in arrays.items():
        if key not in (*PER_TOKEN, "rewards", REFERENCE) and array.ndim and array.shape[0] != shape[0]:
            raise ContractError(
                f"{name}: {key} must have one entry per row, [{shape[0]}, ...], got the shape {list(array.shape)}"
            )


def joined(results: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Rows of all results under each other, right padded with 0; ContractError listing both where their keys differ.

    Input ids [[1, 2, 3]] and [[4, 5]] give [[1, 2, 3], [4, 5, 0]].
    """
    if not results:
        return {}
    check_keys([set(r) for r in results])
    out = {}
    for key in results[0]:
        parts = [r[key] for r in results]
        widths = [max(p.shape[axis] for p in parts) for axis in range(1, parts[0].ndim)]
        padded = [np.pad(p, [(0, 0), *((0, w - n) for w, n in zip(widths, p.shape[1:], strict=True))]) for p in parts]
        out[key] = np.concatenate(padded)
    return out


def check_keys(key_sets: list[set[str]]) -> None:
    first = key_sets[0]
    for keys in key_sets[1:]:
        if keys != first:
            raise ContractError(
                f"rollout.workflow: the episodes of one group must return the same fields, got {_keys(first)} and {_keys(keys)}"
            )


def _keys(keys: Any) -> str:
    return ", ".join(sorted(map(str, keys))) or "nothing"


def _listed(values: np.ndarray) -> str:
    return ", ".join(f"{v:g}" for v in values)
