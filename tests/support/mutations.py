"""Damaged and hostile variants of the bytes of a file, each determined by a random generator."""

import copy
import json
import struct

NUMBERS = [
    0,
    1,
    -1,
    2,
    7,
    255,
    2**16,
    10**6,
    2**31 - 1,
    2**31,
    2**32,
    10**9,
    2**53,
    2**63 - 1,
    2**63,
    2**64,
    10**30,
    10**400,
]
VALUES = [
    *NUMBERS, 0.5, -0.0, 1e-320, 1e308, float("inf"), float("nan"), True, False, None, "", "x", "\0", "\ud800", "../x",
    "/etc/passwd", "/dev/zero", "=1+1", "<script>", "[/red]", "\x1b[2J", "y" * 300, [], [[]], {}, {"a": 1}, [1, 2],
    ["a"], [10**9], {"": None}, "float16", "kernels-community/flash-attn",
]  # fmt: skip
NAMES = [
    "attn_implementation", "auto_map", "num_labels", "num_hidden_layers", "hidden_size", "vocab_size", "architectures",
    "model_type", "torch_dtype", "dtype", "quantization_config", "rope_scaling", "text_config", "layer_types", "format",
    "weight_map", "metadata", "data_offsets", "shape", "tokenizer_class", "vocab_file", "added_tokens_decoder", "rows",
    "max_position_embeddings", "num_attention_heads", "head_dim", "tie_word_embeddings", "id2label", "complete",
    "files",
]  # fmt: skip


def damaged_bytes(data, rng):
    """Truncate, flip, overwrite with absurd numbers, insert, remove or repeat bytes."""
    size = len(data)
    kind = rng.randrange(7)
    if kind == 0:
        ends = [0, 1, 4, 7, 8, 9, 16, 24, 100, size // 2, size - 1, size - 8, rng.randrange(size + 1)]
        return data[: max(0, min(size, rng.choice(ends)))]
    changed = bytearray(data)
    start = rng.randrange(max(1, min(size, rng.choice([8, 64, 512, size]))))
    if kind == 1:
        for _ in range(rng.choice([1, 1, 4, 32])):
            changed[rng.randrange(size)] ^= 1 << rng.randrange(8)
    elif kind == 2:
        width = rng.choice(["<I", "<Q", "<H"])
        number = rng.choice(NUMBERS) % 2 ** (8 * struct.calcsize(width))
        changed[start : start + struct.calcsize(width)] = struct.pack(width, number)
    elif kind == 3:
        changed[start:start] = rng.randbytes(rng.choice([1, 8, 200]))
    elif kind == 4:
        del changed[start : start + rng.choice([1, 8, 200])]
    elif kind == 5:
        changed[start:start] = changed[start : start + rng.choice([8, 200, 5000])]
    else:
        changed[start : start + 8] = rng.choice([b"\0" * 8, b"\xff" * 8, b"[[[[[[[[", b'"\\ud800"', b"1e999999"])
    return bytes(changed)


def damaged_json(content, rng):
    """Replace, remove or add a value of a JSON object at a random place."""
    content = json.loads(json.dumps(content))
    for _ in range(rng.choice([1, 1, 2, 4])):
        place = content
        while isinstance(place, dict | list) and place:
            keys = list(place) if isinstance(place, dict) else range(len(place))
            key = rng.choice(keys)
            inner = place[key]
            if not isinstance(inner, dict | list) or not inner or rng.random() < 0.3:
                break
            place = inner
        if not isinstance(place, dict | list) or not place:
            return rng.choice(VALUES)
        action = rng.randrange(5)
        if action == 0:
            del place[key]
        elif action == 1 and isinstance(place, dict):
            place[rng.choice(NAMES)] = copy.deepcopy(rng.choice(VALUES))
        else:
            place[key] = copy.deepcopy(rng.choice(VALUES))
    return content


def damaged_text(data, rng):
    """Variants of a JSON file: its values, its bytes, or something else altogether."""
    kind = rng.randrange(10)
    if kind < 7:
        return json.dumps(damaged_json(json.loads(data), rng)).encode()
    return (
        damaged_bytes(data, rng) if kind < 9 else rng.choice([b"", b"[" * 10**5, b"null", b"1", b"\xff\xfe", b'{"a":'])
    )


def damaged_safetensors(data, rng):
    """Variants of a safetensors file: its header as JSON, with the length of the new one, or its bytes."""
    if rng.random() < 0.4:
        return damaged_bytes(data, rng)
    return _with_header(data, lambda header: damaged_json(header, rng))


def damaged_state(data, rng):
    """Variants of a state (engine/state_file.py): the JSON in its metadata, or those of a safetensors file."""
    if rng.random() < 0.3:
        return damaged_safetensors(data, rng)

    def changed(header):
        inner = header["__metadata__"]
        return header | {"__metadata__": {n: json.dumps(damaged_json(json.loads(t), rng)) for n, t in inner.items()}}

    return _with_header(data, changed)


def _with_header(data, change):
    length = int.from_bytes(data[:8], "little")
    header = json.dumps(change(json.loads(data[8 : 8 + length]))).encode()
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def damaged_table(data, rng):
    """Variants of a CSV file: its cells, or its bytes."""
    if rng.random() < 0.3:
        return damaged_bytes(data, rng)
    lines = [line.split(",") for line in data.decode().splitlines()]
    cells = [*map(str, VALUES), "1e400", "9" * 400, '"', "2024-01-01", "1e160", "1e-160", "-1e100", "1e300"]
    for _ in range(rng.choice([1, 1, 3])):
        row = lines[rng.randrange(len(lines))]
        row[rng.randrange(len(row))] = rng.choice(cells)
    return "\n".join(",".join(row) for row in lines).encode("utf-8", "surrogatepass")
