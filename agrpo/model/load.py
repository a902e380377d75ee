"""The model from a hub id or a folder, ready for tree rows; what cannot be trained exactly is refused."""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch
import transformers

from agrpo.errors import ConfigError
from agrpo.model import attention, delta, moe
from agrpo.model.adapter import add_adapter
from agrpo.model.shard import COMPUTE_DTYPES
from agrpo.model.terms import bind
from agrpo.model.tokenizer import first_line, place, source
from agrpo.model.weights import text_parameters

LAYER_TYPES = ("full_attention", "sliding_attention", delta.KIND)
OLDEST_TRANSFORMERS = (5, 2, 0)
_log = logging.getLogger(__name__)


def load_model(
    section: Any, device: torch.device | str, runs_on: torch.device | str | None = None
) -> torch.nn.Module:
    """The model of the `model` section on `device`, ready to train; parameters outside its text model are frozen.

    `runs_on` is where it will be forwarded, by default `device`. Raises ConfigError, one line, for what cannot be loaded
    or trained exactly (MODEL-1, MODEL-2, COMPAT-5, 10, 11).
    """
    config = _opened(section)
    kwargs = {"dtype": section.dtype, **source(section), **section.init_kwargs}
    kwargs["attn_implementation"] = attention.implementation(section.attention_backend)
    loader = _loader(config)
    try:
        model = loader.from_pretrained(section.path, **kwargs)
    except (OSError, ValueError, ImportError, TypeError) as error:
        raise ConfigError(f"model.path: {section.path} cannot be loaded: {first_line(error)}") from error
    refuse_model(model)
    compute = COMPUTE_DTYPES[section.precision] or model.dtype
    for line in attention.check(config.get_text_config(), section.attention_backend, runs_on or device, compute):
        _log.info("attention, %s", line)
    if "gguf_file" in section.init_kwargs:
        # The loader leaves marks of the file's quantization; the weights are dequantized and saved like any others.
        model.config.__dict__.pop("quantization_config", None)
        model.__dict__.pop("hf_quantizer", None)
    model = prepare(model, section).to(device)
    attention.refuse_decoder(model.get_decoder())
    return model


def skeleton(section: Any) -> torch.nn.Module:
    """As `load_model`, without storage and values; raises ConfigError for what the configuration alone refuses."""
    config = _opened(section)
    kwargs = {"attn_implementation": attention.implementation(section.attention_backend), **source(section)}
    if section.dtype != "auto":
        kwargs["dtype"] = getattr(torch, section.dtype)
    with torch.device("meta"):
        model = _loader(config).from_config(config, **kwargs)
        return prepare(model, section)


def _opened(section: Any) -> Any:
    """The configuration of a model that can be trained here; sets what holds for the whole process."""
    require_transformers(transformers.__version__)
    attention.register()
    if section.tf32 is not None:
        torch.backends.cuda.matmul.allow_tf32 = section.tf32
    config = load_config(section)
    refuse_config(config)
    return config


def prepare(model: torch.nn.Module, section: Any) -> torch.nn.Module:
    """Computes as the sampler does, frozen outside the text model or the adapter, activations recomputed (MODEL-6, 7).

    Nothing stays in training mode but the layers that recompute their activations and the modules of the adapter.
    """
    delta.bind(model)
    # Dropout, skipped layers, noise in routers: with any of it the two policies would differ.
    model.eval()
    inside = text_parameters(model)
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in inside)
    moe.attach(model, section)
    if section.lora.enabled:
        add_adapter(model, section)
    if section.gradient_checkpointing:
        _checkpoint_activations(model, section)
    bind(model, None)
    trainable, frozen = count_parameters(model)
    _log.info("%s: %d trainable and %d frozen parameters", type(model).__name__, trainable, frozen)
    return model


def load_config(section: Any) -> Any:
    """The model's transformers configuration; raises ConfigError."""
    try:
        return transformers.AutoConfig.from_pretrained(section.path, **source(section), **place(section))
    except (OSError, ValueError, KeyError) as error:
        if "trust_remote_code" in str(error):
            raise ConfigError(f"model.trust_remote_code must be true: {section.path} ships its own code") from error
        raise ConfigError(f"model.path: {section.path} cannot be loaded: {first_line(error)}") from error


def require_transformers(version: str) -> None:
    """Raises ConfigError with both versions below 5.2.0 (COMPAT-5)."""
    numbers = tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in version.split(".")[:3])
    if numbers < OLDEST_TRANSFORMERS:
        needed = ".".join(map(str, OLDEST_TRANSFORMERS))
        raise ConfigError(
            f"transformers {version} is too old, {needed} or newer is needed: pip install -U transformers"
        )


def refuse_config(config: Any) -> None:
    """Raises ConfigError for layers that cannot be trained exactly (COMPAT-11)."""
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ())
    for kind in sorted(kinds - set(LAYER_TYPES)):
        allowed = ", ".join(LAYER_TYPES)
        raise ConfigError(
            f"model.path: {config.model_type} has {kind} layers, which cannot be trained; allowed: {allowed}"
        )


def refuse_model(model: torch.nn.Module) -> None:
    """Raises ConfigError for attention sinks (COMPAT-10) and for attention outside transformers' interface."""
    decoder = model.get_decoder()
    if any(name.rsplit(".", 1)[-1] in ("sinks", "sink") for name, _ in decoder.named_parameters()):
        raise ConfigError(f"model.path: {type(model).__name__} has attention sinks, which tree attention lacks")
    # Some families use the interface without saying so, Qwen3-Next and Qwen3.5 among them.
    uses_interface = hasattr(sys.modules[type(decoder).__module__], "ALL_ATTENTION_FUNCTIONS")
    if not (decoder._supports_attention_backend or uses_interface):
        raise ConfigError(f"model.path: {type(model).__name__} does not support attention back ends of transformers")


def count_parameters(model: torch.nn.Module) -> tuple[int, int]:
    """Trainable and frozen parameters, tied weights once."""
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return trainable, sum(p.numel() for p in model.parameters()) - trainable


def _loader(config: Any) -> Any:
    architecture = (getattr(config, "architectures", None) or [""])[0]
    images = transformers.models.auto.modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    if architecture and architecture in images.values():
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def _checkpoint_activations(model: torch.nn.Module, section: Any) -> None:
    arguments = {"use_reentrant": False, **(section.gradient_checkpointing_kwargs or {})}
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(arguments)
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True  # of itself, not of its children: transformers recomputes in training mode only
            for name, value in vars(module).items():
                if "drop" in name and isinstance(value, float):
                    setattr(module, name, 0.0)  # some families' layers apply dropout themselves, by this number
    if section.lora.enabled and arguments["use_reentrant"]:
        # Reentrant checkpointing passes gradients only through inputs that need one; the embeddings are frozen.
        model.enable_input_require_grads()
