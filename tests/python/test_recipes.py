"""What users of llama-quantize and mlx_lm.convert expect of bittern quantize: mixes, the flags of
both, split files, legacy importance matrices; and options that would have no effect are refused or
told. llama.cpp is the judge of the mixes, mlx of -q."""

import ctypes
import json
import struct

import arrays
import numpy as np
import pytest

from test_cli import COMMAND, bittern, refused
from test_quantize import load, weights, write_folder, write_gguf

pytestmark = pytest.mark.skipif(
    COMMAND is None, reason="the command is not built (build/release/bittern)"
)
gguf = pytest.importorskip("gguf")

# Names of llama-quantize and general.file_type.
FILE_TYPES = {
    "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K_S": 11, "Q3_K_M": 12,
    "Q3_K_L": 13, "Q4_K_S": 14, "Q4_K_M": 15, "Q5_K_S": 16, "Q5_K_M": 17, "Q6_K": 18, "F16": 1,
    "BF16": 32,
}  # fmt: skip

# What decides: layers, sharing of keys, experts, whether the embedding is the head, rows that no
# super-block divides.
MODELS = {
    "plain": {"layers": 17},
    "shared": {"layers": 8, "heads": 8, "kv": 2},
    "tied": {"layers": 3, "tied": True},
    "experts": {"layers": 4, "experts": 8},
    "fewer experts": {"layers": 9, "experts": 4},
    "70B": {"layers": 80, "heads": 4, "kv": 1},
    "qwen2": {"layers": 5, "arch": "qwen2"},
    "narrow": {"layers": 4, "width": 96},
    "narrow, tied": {"layers": 2, "width": 96, "tied": True},
}


def tiny_gguf(path, layers, heads=2, kv=2, experts=0, tied=False, width=256, arch="llama", rng=None):
    rng = rng or np.random.default_rng(1)
    tensors = {}

    def describe(writer):
        writer.add_block_count(layers)
        writer.add_context_length(64)
        writer.add_embedding_length(width)
        writer.add_feed_forward_length(256)
        writer.add_head_count(heads)
        writer.add_head_count_kv(kv)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_vocab_size(8)
        if experts:
            writer.add_expert_count(experts)
            writer.add_expert_used_count(2)

    def add(name, *shape):
        tensors[name] = rng.standard_normal(shape).astype(np.float32)

    add("token_embd.weight", 8, width)
    if not tied:
        add("output.weight", 8, width)
    add("output_norm.weight", width)
    for i in range(layers):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{i}.{name}.weight", 4, width)
        add(f"blk.{i}.attn_norm.weight", width)
        add(f"blk.{i}.ffn_norm.weight", width)
        if experts:
            add(f"blk.{i}.ffn_gate_inp.weight", experts, width)
            add(f"blk.{i}.ffn_down_exps.weight", experts, 2, 256)
            for name in ("ffn_gate_exps", "ffn_up_exps"):
                add(f"blk.{i}.{name}.weight", experts, 2, width)
        else:
            add(f"blk.{i}.ffn_down.weight", 2, 256)
            for name in ("ffn_gate", "ffn_up"):
                add(f"blk.{i}.{name}.weight", 2, width)
    return arrays.write_gguf(path, tensors, arch, describe)


def types(path):
    reader = gguf.GGUFReader(path)
    file_type = reader.fields["general.file_type"].contents()
    return {t.name: t.tensor_type.name for t in reader.tensors}, file_type


def dry_types(*args):
    """Types as --dry-run tells them."""
    result = bittern("quantize", *args, "--dry-run")
    assert result.returncode == 0, result
    lines = [line.split() for line in result.stdout.splitlines()]
    return {w[0]: w[-3] if w[-1] in ("B", "kB", "MB") else None for w in lines if ".weight" in w[0]}


def quantise(source, out, *flags):
    result = bittern("quantize", source, "-o", out, *flags)
    assert result.returncode == 0, result
    return result.stdout


def llama_quantize(source, out, file_type, **params):
    import llama_cpp

    wanted = llama_cpp.llama_model_quantize_default_params()
    wanted.ftype = file_type
    wanted.nthread = 1
    for name, value in params.items():
        setattr(wanted, name, value)
    status = llama_cpp.llama_model_quantize(str(source).encode(), str(out).encode(), ctypes.byref(wanted))
    assert status == 0
    return out


@pytest.mark.peer("llama_cpp")
@pytest.mark.parametrize("recipe", FILE_TYPES)
@pytest.mark.parametrize("model", MODELS)
def test_every_tensor_has_the_type_llama_quantize_gives(tmp_path, model, recipe):
    source = tiny_gguf(tmp_path / "in.gguf", **MODELS[model])
    theirs = llama_quantize(source, tmp_path / "theirs.gguf", FILE_TYPES[recipe])
    quantise(source, tmp_path / "ours.gguf", "--type", recipe)
    assert types(tmp_path / "ours.gguf") == types(theirs)


@pytest.mark.peer("llama_cpp")
@pytest.mark.parametrize("model", ["plain", "tied"])
@pytest.mark.parametrize(
    "flags, params",
    [
        (("--output-tensor-type", "Q8_0"), {"output_tensor_type": 8}),
        (("--token-embedding-type", "Q5_K"), {"token_embedding_type": 13}),
        (("--leave-output-tensor",), {"quantize_output_tensor": False}),
        (("--pure",), {"pure": True}),
        (
            ("--output-tensor-type", "Q8_0", "--token-embedding-type", "F16"),
            {"output_tensor_type": 8, "token_embedding_type": 1},
        ),
    ],
)
def test_llama_quantizes_flags(tmp_path, model, flags, params):
    source = tiny_gguf(tmp_path / "in.gguf", **MODELS[model])
    theirs = llama_quantize(source, tmp_path / "theirs.gguf", 15, **params)
    quantise(source, tmp_path / "ours.gguf", "--type", "Q4_K_M", *flags)
    assert types(tmp_path / "ours.gguf") == types(theirs)


def test_a_mix_by_hand(tmp_path):
    """The same without llama.cpp: 8 layers, of which 0, 3, 6 and 7 get more bits."""
    source = tiny_gguf(tmp_path / "in.gguf", layers=8)
    quantise(source, tmp_path / "out.gguf", "--type", "q4_k_m")
    got, file_type = types(tmp_path / "out.gguf")
    assert file_type == 15
    for i in range(8):
        more = "Q6_K" if i in (0, 3, 6, 7) else "Q4_K"
        assert got[f"blk.{i}.attn_v.weight"] == got[f"blk.{i}.ffn_down.weight"] == more
        assert got[f"blk.{i}.attn_q.weight"] == "Q4_K"
        assert got[f"blk.{i}.attn_norm.weight"] == "F32"
    assert got["output.weight"] == "Q6_K" and got["token_embd.weight"] == "Q4_K"
    assert dry_types(source, "--type", "Q4_K_M") == {
        name: got[name] for name in dry_types(source, "--type", "Q4_K_M")
    }
    quantise(source, tmp_path / "alias.gguf", "--type", "Q4_K")
    assert types(tmp_path / "alias.gguf") == (got, 15)
    quantise(source, tmp_path / "pure.gguf", "--type", "Q4_K", "--pure")
    matrices = {t for n, t in types(tmp_path / "pure.gguf")[0].items() if "norm" not in n}
    assert matrices == {"Q4_K"}


def test_the_head_and_the_embedding(tmp_path):
    source = tiny_gguf(tmp_path / "in.gguf", layers=1)

    def ends(*flags):
        out = tmp_path / "out.gguf"
        text = quantise(source, out, "--type", "Q4_K_M", "--force", *flags)
        got = types(out)[0]
        return got["token_embd.weight"], got["output.weight"], text

    assert ends("--output-tensor-type", "q8_0")[:2] == ("Q4_K", "Q8_0")
    assert ends("--token-embedding-type", "Q5_K")[:2] == ("Q5_K", "Q6_K")
    assert ends("--leave-output-tensor")[:2] == ("Q4_K", "F32")
    # They come before rules; the rule that is left without a tensor is told.
    *got, text = ends("--output-tensor-type", "Q8_0", "--tensor-type", "^output=Q5_K")
    assert got == ["Q4_K", "Q8_0"] and "the rule ^output has no effect" in text

    tied = tiny_gguf(tmp_path / "tied.gguf", layers=1, tied=True)
    for flags, expected, told in (
        (("--leave-output-tensor",), "Q6_K", "--leave-output-tensor has no effect"),
        (("--output-tensor-type", "Q8_0"), "Q8_0", "gets that type"),
        (("--token-embedding-type", "Q5_K"), "Q5_K", ""),
    ):
        out = tmp_path / "tied-out.gguf"
        text = quantise(tied, out, "--type", "Q4_K_M", "--force", *flags)
        assert types(out)[0]["token_embd.weight"] == expected and told in text


def test_leaving_the_head_in_a_folder(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {"lm_head.weight": weights(rng), "model.layers.0.a.weight": weights(rng)}
    folder = write_folder(tmp_path / "hf", tensors)
    quantise(folder, tmp_path / "out", "--bits", 4, "--leave-output-tensor")
    out = load(tmp_path / "out")
    assert np.array_equal(out["lm_head.weight"], tensors["lm_head.weight"])
    assert out["model.layers.0.a.weight"].dtype == np.uint32


# ---- as mlx_lm.convert ----


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(1)
    tensors = {f"model.layers.{i}.a.weight": weights(rng) for i in range(2)}
    tensors["model.norm.weight"] = weights(rng, 1)[0]
    return write_folder(tmp_path / "hf", tensors)


def test_quantise_as_mlx_lm_does(folder, tmp_path):
    result = bittern("quantize", "--hf-path", folder, "--mlx-path", tmp_path / "out", "-q")
    assert result.returncode == 0, result
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization"] == {"group_size": 64, "bits": 4, "mode": "affine"}
    result = bittern(
        "quantize", "--model", folder, "-o", tmp_path / "8", "-q", "--q-bits", 8, "--q-group-size", 32
    )
    assert result.returncode == 0, result
    config = json.loads((tmp_path / "8" / "config.json").read_text())
    assert config["quantization"] == {"group_size": 32, "bits": 8, "mode": "affine"}
    refused(bittern("quantize", folder, "--hf-path", folder, "--dry-run", "-q"), 2, "both given")
    refused(bittern("quantize", "--dry-run", "-q"), 2, "MODEL: not given")


@pytest.mark.peer("mlx")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_dtype_of_what_is_not_quantised(folder, tmp_path, dtype):
    import mlx.core as mx

    short = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}[dtype]
    quantise(folder, tmp_path / "q", "-q", "--dtype", short, "--method", "mlx")
    ours = mx.load(str(tmp_path / "q" / "model.safetensors"))
    assert ours["model.norm.weight"].dtype == getattr(mx, dtype)
    w = mx.array(load(folder)["model.layers.1.a.weight"]).astype(getattr(mx, dtype))
    for part, theirs in zip(("weight", "scales", "biases"), mx.quantize(w, 64, 4)):
        assert mx.array_equal(ours[f"model.layers.1.a.{part}"], theirs)
    quantise(folder, tmp_path / "plain", "--dtype", dtype)  # as mlx_lm.convert spells it
    plain = mx.load(str(tmp_path / "plain" / "model.safetensors"))
    assert {t.dtype for t in plain.values()} == {getattr(mx, dtype)}
    assert mx.array_equal(plain["model.layers.1.a.weight"], w)
    # A model that is quantised is not dequantised by the way.
    refused(bittern("quantize", tmp_path / "q", "--dtype", short, "--dry-run"), 2, "--dequantize")


def test_dtype_of_a_gguf_file(tmp_path):
    source = tiny_gguf(tmp_path / "in.gguf", layers=1)
    quantise(source, tmp_path / "out.gguf", "--dtype", "bf16")
    got = types(tmp_path / "out.gguf")[0]
    assert got["token_embd.weight"] == "BF16" and got["output_norm.weight"] == "F32"


# ---- options in vain ----


@pytest.mark.parametrize(
    "flags, texts",
    [
        (("--transcode", "--policy", "p.json"), ("--policy", "--transcode")),
        (("--dequantize", "f32", "--policy", "p.json"), ("--policy", "--dequantize")),
        (("-q", "--transcode"), ("-q", "--transcode")),
        (("-q", "--dequantize", "f16"), ("-q", "--dequantize")),
        (("--bits", 4, "--resume", "--dry-run"), ("--resume", "--dry-run")),
        (("--transcode", "--group-size", 32), ("--group-size", "--transcode")),
        (("--transcode", "--method", "lsq"), ("--method", "--transcode")),
        (("--transcode", "--override", "a=4"), ("--override", "--transcode")),
        (("--transcode", "--tensor-type", "a=Q8_0"), ("--tensor-type", "--transcode")),
        (("--dequantize", "f32", "--pure"), ("--pure", "--dequantize")),
        (("--dequantize", "f32", "--scale-dtype", "f16"), ("--scale-dtype", "--dequantize")),
        (("--dequantize", "f32", "--imatrix", "x"), ("--imatrix", "--dequantize")),
        (("--bits", 4, "--target-bpw", 5), ("--bits and --target-bpw",)),
        (("--type", "Q4_K_M", "--target-bpw", 5), ("--type and --target-bpw",)),
        (("--type", "Q4_K_M", "--group-size", 32), ("--type and --group-size",)),
        (("--target-bpw", "nan"), ("--target-bpw", "nan")),
        (("--target-bpw", "inf"), ("--target-bpw", "inf")),
        (("--target-bpw", "4x"), ("--target-bpw", "4x")),
        (("--bits", 4, "--output-tensor-type", "Q8_0", "--format", "mlx"), ("--output-tensor-type", "gguf")),
        (("--bits", 4, "--split-max-size", "2G", "--format", "mlx"), ("--split-max-size", "gguf")),
        (("--type", "Q8_0", "--split-max-size", "2"), ("--split-max-size: 2,", "500M")),
        (("--type", "Q8_0", "--split-max-size", "0G"), ("--split-max-size: 0G,",)),
        (("--type", "Q8_0", "--split-max-size", "2G", "--split-max-tensors", 3), ("both given",)),
        (("--type", "Q8_0", "--leave-output-tensor", "--output-tensor-type", "F16"), ("both given",)),
        (("--dtype", "f16", "--dequantize", "f16"), ("--dtype", "--dequantize")),
        (("--dtype", "f8", "--bits", 4), ("--dtype: f8",)),
        (("--dtype", "f16", "--transcode"), ("--dtype", "--transcode")),
    ],
)
def test_options_that_would_be_ignored_are_refused(folder, flags, texts):
    flags = flags if "--dry-run" in flags else (*flags, "--dry-run")
    result = bittern("quantize", folder, *flags)
    assert result.returncode == 2 and result.stdout == "", result
    for text in texts:
        assert text in result.stderr, result.stderr


@pytest.mark.parametrize("dry", [True, False])
def test_rules_in_vain_are_told(folder, tmp_path, dry):
    flags = ("--override", "norm=4", "--override", "nothing=8", "--override", r"layers\.0=8",
             "--override", r"layers\.0\.a=6")  # fmt: skip
    out = tmp_path / "out"
    result = bittern("quantize", folder, "-o", out, "--bits", 4, *flags, *["--dry-run"] * dry)
    assert result.returncode == 0, result
    assert "the rule norm has no effect: it matches model.norm.weight, which is no matrix" in result.stdout
    assert "the rule nothing matches no tensor" in result.stdout
    assert r"the rule layers\.0\.a has no effect: earlier rules" in result.stdout
    assert r"the rule layers\.0 " not in result.stdout


def test_options_that_name_the_head_come_before_rules(folder, tmp_path):
    source = tiny_gguf(tmp_path / "in.gguf", layers=1)
    out = tmp_path / "o.gguf"
    text = quantise(
        source, out, "--type", "Q8_0", "--output-tensor-type", "Q6_K", "--override", r"^output\.weight=keep",
        "--override", "attn_q=keep",
    )  # fmt: skip
    assert types(out)[0]["output.weight"] == "Q6_K" and types(out)[0]["blk.0.attn_q.weight"] == "F32"
    assert r"the rule ^output\.weight has no effect: it matches output.weight, whose type another" in text
    assert "the rule attn_q has no effect" not in text
    flags = ("--type", "Q8_0", "--leave-output-tensor", "--override", r"^output\.weight=Q6_K")
    text = quantise(source, tmp_path / "l.gguf", *flags)
    assert types(tmp_path / "l.gguf")[0]["output.weight"] == "F32"
    assert r"the rule ^output\.weight has no effect: it matches output.weight, which --leave" in text
    # What is kept anyway needs no rule.
    text = quantise(folder, tmp_path / "k", "--bits", 4, "--override", "norm=keep")
    assert "the rule norm has no effect: it matches model.norm.weight, which is no matrix" in text


def test_options_without_anything_to_act_on_are_told(folder, tmp_path):
    text = quantise(folder, tmp_path / "t", "--transcode", "--scale-dtype", "f16")
    assert "--scale-dtype has no effect: no tensor has scales" in text and "are exact" not in text
    text = quantise(folder, tmp_path / "r", "--bits", 4, "--allow-requantize")
    assert "--allow-requantize has no effect: the model is not quantised" in text
    text = quantise(tmp_path / "r", tmp_path / "rr", "--bits", 8, "--allow-requantize", "--scale-dtype", "f16")
    assert "has no effect" not in text
    source = tiny_gguf(tmp_path / "in.gguf", layers=1)
    text = quantise(source, tmp_path / "d.gguf", "--type", "F16", "--dtype", "bf16")
    assert "--dtype has no effect: other options give every matrix its type" in text
    assert "BF16" not in types(tmp_path / "d.gguf")[0].values()
    text = quantise(source, tmp_path / "p.gguf", "--type", "Q8_0", "--pure")
    assert "--pure has no effect" in text
    assert "--pure has no effect" not in quantise(source, tmp_path / "m.gguf", "--type", "Q4_K_M", "--pure")


def test_a_method_in_vain_is_told(tmp_path):
    source = tiny_gguf(tmp_path / "in.gguf", layers=1)
    text = quantise(source, tmp_path / "o.gguf", "--type", "Q8_0", "--method", "lsq")
    assert "--method lsq has no effect" in text
    text = quantise(source, tmp_path / "p.gguf", "--type", "Q4_K_M", "--method", "lsq")
    assert "has no effect" not in text


# ---- importance ----


def legacy(entries, chunks=5, dataset=b"text.txt"):
    data = struct.pack("<i", len(entries))
    for name, calls, values in entries:
        data += struct.pack("<i", len(name)) + name + struct.pack("<ii", calls, len(values))
        data += np.asarray(values, np.float32).tobytes()
    return data + struct.pack("<ii", chunks, len(dataset)) + dataset


def blocks(path):
    return {t.name: bytes(t.data.tobytes()) for t in gguf.GGUFReader(path).tensors}


def test_a_legacy_matrix_weighs_as_the_same_in_gguf(tmp_path):
    rng = np.random.default_rng(2)
    source = tiny_gguf(tmp_path / "in.gguf", layers=2, experts=4)
    names = [t.name for t in gguf.GGUFReader(source).tensors if len(t.shape) > 1]
    old, new = [], {}
    for name in names:
        experts = 4 if "exps" in name else 1
        mean = rng.random((experts, 256)).astype(np.float32)
        # Powers of two: no rounding on either way.
        old.append((name.encode(), 8, (mean * 8).ravel()))
        new[f"{name}.in_sum2"] = mean * 4
        new[f"{name}.counts"] = np.full((experts, 1), 4, np.float32)
    (tmp_path / "old.dat").write_bytes(legacy(old))
    write_gguf(tmp_path / "new.gguf", new, type="imatrix")
    for flags in (("--type", "Q4_K_M"), ("--type", "Q4_1", "--method", "lsq")):
        quantise(source, tmp_path / "none.gguf", "--force", *flags)
        text = quantise(source, tmp_path / "a.gguf", "--force", "--imatrix", tmp_path / "old.dat", *flags)
        assert "weighs the errors of" in text
        quantise(source, tmp_path / "b.gguf", "--force", "--imatrix", tmp_path / "new.gguf", *flags)
        assert blocks(tmp_path / "a.gguf") == blocks(tmp_path / "b.gguf") != blocks(tmp_path / "none.gguf")
    # Files of earlier versions end after the entries, or after the chunks.
    for cut in (len(b"text.txt") + 8, len(b"text.txt") + 4):
        (tmp_path / "short.dat").write_bytes(legacy(old)[:-cut])
        quantise(source, tmp_path / "c.gguf", "--force", "--imatrix", tmp_path / "short.dat", "--type", "Q4_K_M")


def test_damaged_legacy_matrices_are_refused(tmp_path):
    source = tiny_gguf(tmp_path / "in.gguf", layers=1)
    name = b"blk.0.attn_q.weight"
    good = legacy([(name, 1, np.ones(256)), (b"blk.0.attn_k.weight", 1, np.ones(256))])
    path = tmp_path / "m.dat"

    def attempt(data):
        path.write_bytes(data)
        return bittern("quantize", source, "--dry-run", "--quiet", "--type", "Q4_K_M", "--imatrix", path)

    assert attempt(good).returncode == 0
    whole = len(good) - len(b"text.txt") - 8  # where the entries end
    for end in range(1, len(good)):
        result = attempt(good[:end]) if end % 37 == 0 or end < 48 else None
        if result is not None and end not in (whole, whole + 4):
            refused(result, 2, "m.dat: byte")
    bad = {
        "entries": struct.pack("<i", 0) + good[4:],
        "-1 entries": struct.pack("<i", -1) + good[4:],
        "a name of": good[:4] + struct.pack("<i", -5) + good[8:],
        "name of 2147483647": good[:4] + struct.pack("<i", 2**31 - 1) + good[8:],
        "values": legacy([(name, 1, [])]),
        "calls": legacy([(name, -1, np.ones(256))]),
        "given twice": legacy([(name, 1, np.ones(256))] * 2),
        "after the last entry": good + b"x",
        "holds -1": legacy([(name, 1, -np.ones(256))]),
        "holds inf": legacy([(name, 1, np.full(256, np.inf))]),
        "not UTF-8": legacy([(b"blk.0.attn_\xff.weight", 1, np.ones(256))]),
        "255 numbers": legacy([(name, 1, np.ones(255))]),
    }
    for text, data in bad.items():
        refused(attempt(data), 2, "m.dat", text)
    refused(attempt(legacy([(b"other", 1, np.ones(256))])), 2, "no entry for any tensor")


def test_importance_is_claimed_only_where_it_is_used(tmp_path):
    source = tiny_gguf(tmp_path / "in.gguf", layers=1)
    names = ["blk.0.attn_q.weight", "blk.0.attn_v.weight"]
    (tmp_path / "m.dat").write_bytes(legacy([(n.encode(), 1, np.ones(256)) for n in names]))
    flags = ("--imatrix", tmp_path / "m.dat")
    for kind in ("Q8_0", "Q4_0"):
        text = quantise(source, tmp_path / f"{kind}.gguf", "--type", kind, "--pure", *flags)
        assert "m.dat has no effect" in text and f"not used by {kind}: 2 tensors" in text
        assert "weighs" not in text
        assert "quantize.imatrix.file" not in gguf.GGUFReader(tmp_path / f"{kind}.gguf").fields
    text = quantise(source, tmp_path / "k.gguf", "--type", "Q4_K_M", *flags)
    assert "weighs the errors of 2 tensors" in text and "has no entry for" in text
    assert "quantize.imatrix.file" in gguf.GGUFReader(tmp_path / "k.gguf").fields
    text = quantise(source, tmp_path / "r.gguf", "--type", "Q4_K_M", "--tensor-type", "attn_q=Q8_0", *flags)
    assert "weighs the errors of 1 tensor\n" in text and "not used by Q8_0: 1 tensor\n" in text


# ---- what the plan promises ----


def raw_gguf(path, tensors):
    """Tensors of any type, their bytes at random."""
    rng = np.random.default_rng(3)
    blocks = {}
    for name, (kind, rows, columns) in tensors.items():
        block, size = gguf.GGML_QUANT_SIZES[kind]
        blocks[name] = rng.integers(0, 60, (rows, columns // block * size), np.uint8), kind
    return arrays.write_gguf(path, blocks)


@pytest.mark.parametrize("kind", ["IQ2_XS", "IQ3_S", "IQ1_S"])
def test_a_dry_run_refuses_what_the_run_refuses(tmp_path, kind):
    types_ = gguf.GGMLQuantizationType
    source = raw_gguf(
        tmp_path / "in.gguf",
        {"fine.weight": (types_.Q8_0, 4, 256), "sick.weight": (types_[kind], 4, 256)},
    )
    for flags in (
        ("--type", "Q8_0", "--allow-requantize"),
        ("--type", "Q8_0"),
        ("--dequantize", "f16", "--format", "gguf"),
        ("--bits", 4, "--format", "gguf", "--allow-requantize"),
        ("--target-bpw", 9, "--format", "gguf", "--allow-requantize"),
    ):
        dry = bittern("quantize", source, "--dry-run", "--quiet", *flags)
        real = bittern("quantize", source, "-o", tmp_path / "out.gguf", "--quiet", *flags)
        assert dry.returncode == real.returncode != 0 and dry.stderr == real.stderr, (dry, real)
        refused(dry, dry.returncode, "in.gguf")
    # Moved as it is.
    assert bittern("quantize", source, "--transcode", "--format", "gguf", "--dry-run").returncode == 0


def test_a_dry_run_refuses_an_output_that_exists(folder, tmp_path):
    out = tmp_path / "out"
    quantise(folder, out, "--bits", 4)
    refused(bittern("quantize", folder, "-o", out, "--bits", 4, "--dry-run"), 2, "out: exists")


def test_advice_works_when_followed(folder, tmp_path):
    quantise(folder, tmp_path / "mlx", "--bits", 4)
    result = bittern("quantize", tmp_path / "mlx", "-o", tmp_path / "x", "--bits", 8)
    refused(result, 2, "--transcode", "--dequantize", "--allow-requantize")
    quantise(tmp_path / "mlx", tmp_path / "t", "--transcode")
    quantise(tmp_path / "mlx", tmp_path / "d", "--dequantize", "f32")
    quantise(tmp_path / "mlx", tmp_path / "r", "--bits", 8, "--allow-requantize")
    # Where --transcode cannot work, it is no advice.
    result = bittern("quantize", tmp_path / "mlx", "-o", tmp_path / "y", "--bits", 8, "--format", "safetensors")
    assert result.returncode == 2 and "--transcode" not in result.stderr
    assert "--dequantize" in result.stderr


# ---- parts ----


def test_split_files(tmp_path):
    source = tiny_gguf(tmp_path / "in.gguf", layers=4)
    one = tmp_path / "one.gguf"
    quantise(source, one, "--type", "Q4_K_M")
    whole = blocks(one)
    out = tmp_path / "parts"
    out.mkdir()
    text = quantise(source, out / "m.gguf", "--type", "Q4_K_M", "--split-max-tensors", 10)
    count = -(-len(whole) // 10)
    names = [f"m-{i + 1:05}-of-{count:05}.gguf" for i in range(count)]
    assert sorted(p.name for p in out.iterdir()) == names
    assert f"{count} files, {names[0]} to {names[-1]}" in text
    joined = {}
    for i, name in enumerate(names):
        reader = gguf.GGUFReader(out / name)
        assert reader.fields["split.no"].contents() == i
        assert reader.fields["split.count"].contents() == count
        assert reader.fields["split.tensors.count"].contents() == len(whole)
        assert reader.fields["split.no"].types == [gguf.GGUFValueType.UINT16]
        assert reader.fields["split.count"].types == [gguf.GGUFValueType.UINT16]
        assert reader.fields["split.tensors.count"].types == [gguf.GGUFValueType.INT32]
        assert ("general.architecture" in reader.fields) == (i == 0)
        joined.update({t.name: bytes(t.data.tobytes()) for t in reader.tensors})
    assert joined == whole
    # bittern reads the set by any part, and joins it again.
    quantise(out / names[1], tmp_path / "joined.gguf", "--transcode")
    assert blocks(tmp_path / "joined.gguf") == whole
    # It is there already.
    again = ("quantize", source, "-o", out / "m.gguf", "--type", "Q4_K_M", "--split-max-tensors", 10)
    refused(bittern(*again, "--quiet"), 2, "exists", "--force")
    assert bittern(*again, "--force").returncode == 0
    assert sorted(p.name for p in out.iterdir()) == names


def test_dtype_and_pure_that_change_nothing(tmp_path):
    source = tiny_gguf(tmp_path / "in.gguf", layers=2)
    for what in (["--type", "Q4_K_M"], ["--bits", "4"], ["--target-bpw", "6"]):
        args = ("quantize", source, "-o", tmp_path / "m.gguf", *what, "--dry-run")
        text = bittern(*args, "--dtype", "f16").stdout
        assert "--dtype has no effect: other options give every matrix its type" in text
        text = bittern(*args, "--dtype", "f16", "--override", "attn_q=keep").stdout
        assert "--dtype has no effect" not in text
        if what[0] != "--target-bpw":
            text = bittern(*args, "--pure").stdout
            assert ("--pure has no effect: no matrix is kept by default" in text) == (what[0] == "--bits")
    source = tiny_gguf(tmp_path / "moe.gguf", layers=2, experts=4)
    text = bittern("quantize", source, "-o", tmp_path / "m.gguf", "--bits", "4", "--pure", "--dry-run").stdout
    assert "blk.0.ffn_gate_inp.weight" in text and "--pure has no effect" not in text


@pytest.mark.parametrize("router", ["block_sparse_moe.gate", "mlp.gate", "mlp.router"])
def test_routers_stay_as_they_are(router, tmp_path):
    rng = np.random.default_rng(1)
    name = f"model.layers.0.{router}.weight"
    tensors = {name: weights(rng, 4, 128), "model.layers.0.a.weight": weights(rng)}
    folder = write_folder(tmp_path / "hf", tensors)
    text = bittern("quantize", folder, "-o", tmp_path / "out", "--bits", "4").stdout
    assert f"note: router: left as it is: {name}" in text
    np.testing.assert_array_equal(load(tmp_path / "out")[name], tensors[name])


@pytest.mark.peer("llama_cpp")
def test_llama_cpp_reads_parts(tmp_path):
    source = tiny_gguf(tmp_path / "in.gguf", layers=2)
    quantise(source, tmp_path / "m.gguf", "--type", "Q8_0", "--split-max-tensors", 7)
    first = sorted(tmp_path.glob("m-00001-of-*.gguf"))[0]
    joined = llama_quantize(first, tmp_path / "joined.gguf", 7)
    assert types(joined)[0] == {
        t.name: t.tensor_type.name for p in tmp_path.glob("m-*.gguf") for t in gguf.GGUFReader(p).tensors
    }


def test_split_by_size(tmp_path):
    source = tiny_gguf(tmp_path / "in.gguf", layers=1)
    rng = np.random.default_rng(4)
    tensors = {f"blk.{i}.a.weight": weights(rng, 512, 1024) for i in range(3)}  # 2 MiB each
    source = write_gguf(tmp_path / "big.gguf", tensors)
    quantise(source, tmp_path / "m.gguf", "--dequantize", "f32", "--split-max-size", "5M")
    assert sorted(p.name for p in tmp_path.glob("m-*")) == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    text = quantise(source, tmp_path / "n.gguf", "--dequantize", "f32", "--split-max-size", "1M")
    assert "blk.0.a.weight and 2 more are larger, and each is a part of its own" in text
    assert text.count("--split-max-size") == 1 and len(list(tmp_path.glob("n-*"))) == 3
    quantise(source, tmp_path / "o.gguf", "--dequantize", "f32", "--split-max-size", "1G")
    assert [p.name for p in tmp_path.glob("o*")] == ["o-00001-of-00001.gguf"]


@pytest.mark.peer("gguf")
def test_what_llama_quantize_refuses_without_an_importance_matrix_is_told(tmp_path):
    rng = np.random.default_rng(0)
    source = write_gguf(tmp_path / "in.gguf", {"blk.0.attn_q.weight": weights(rng, 8, 256)})
    for type in ("Q2_K_S", "q2_k_s", "Q2_K", "Q3_K_S"):
        result = bittern("quantize", source, "-o", tmp_path / "out.gguf", "--type", type, "--dry-run")
        assert result.returncode == 0, result
        told = "note: Q2_K_S without --imatrix" in result.stdout and "llama-quantize refuses" in result.stdout
        assert told == (type.upper() == "Q2_K_S"), result.stdout
