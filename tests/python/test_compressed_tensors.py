"""Folders of compressed-tensors: what the command writes and refuses; with the heavy peers, what transformers and
the package `compressed-tensors` load: the same weights to the bit, and logits."""

import json

import numpy as np
import pytest
from small_models import put_model, read
from test_cli import bittern as command, refused

import bittern

TOKENS = [3 + i * 7 % 70 for i in range(40)]
FLAGS = ("--group-size", 32, "--format", "compressed-tensors", "--threads", 1)
KINDS = [("llama", 4, "bf16"), ("llama", 3, "f16"), ("llama", 8, "f32"), ("qwen3", 4, "f16"), ("gemma2", 4, "bf16")]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """made(name, bits, dtype): the folder of a tiny model."""
    work = tmp_path_factory.mktemp("compressed")

    def make(name, bits, dtype, *flags):
        out = work / "-".join(str(word).replace("/", "") for word in (name, bits, dtype, *flags))
        if not (work / name).exists():
            put_model(work / name, name)
        if not out.exists():
            result = command("quantize", work / name, "-o", out, "--bits", bits, "--dtype", dtype, *FLAGS, *flags)
            assert result.returncode == 0, result.stderr
        return out

    return make


def numbers(folder, out, *flags):
    """All tensors as f32."""
    result = command("quantize", folder, "-o", out, *flags, "--threads", 1)
    assert result.returncode == 0, result.stderr
    tensors, _ = read(out / "model.safetensors")
    assert all(dtype == "F32" for dtype, _, _ in tensors.values())
    return {name: np.frombuffer(data, np.float32).reshape(shape) for name, (_, shape, data) in tensors.items()}


def test_what_is_written(made):
    folder = made("llama", 4, "bf16")
    tensors, metadata = read(folder / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    rows, columns = 64, 64
    assert {part: tensors[f"{name}.{part}"][:2] for part in ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape")} == {
        "weight_packed": ("I32", [rows, columns // 8]), "weight_scale": ("BF16", [rows, 2]),
        "weight_zero_point": ("I32", [rows // 8, 2]), "weight_shape": ("I64", [2]),
    }  # fmt: skip
    assert np.frombuffer(tensors[f"{name}.weight_shape"][2], np.int64).tolist() == [rows, columns]
    assert f"{name}.weight" not in tensors and "model.embed_tokens.weight" in tensors
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert settings["quant_method"] == "compressed-tensors" and "lm_head" in settings["ignore"]
    told = command("inspect", folder)
    assert told.returncode == 0 and "compressed-tensors, 4 bit, group 32" in told.stdout
    assert "does not decode" not in told.stdout
    assert bittern.inspect_model(folder).kind == "huggingface"


def test_the_python_call_writes_the_same(made, tmp_path):
    folder = made("llama", 4, "bf16")
    report = bittern.quantize_model(folder.parent / "llama", tmp_path / "out", bits=4, group_size=32, dtype="bf16",
                                    format="compressed-tensors", zero_points="integer")  # fmt: skip
    assert report.format == "compressed-tensors"
    for path in folder.iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name


def test_threads_and_a_run_that_goes_on_change_nothing(made, tmp_path):
    """Zero points of several rows share words."""
    folder = made("llama", 3, "f16")
    again = command("quantize", folder.parent / "llama", "-o", tmp_path / "out", "--bits", 3, "--dtype", "f16",
                    "--group-size", 32, "--format", "compressed-tensors", "--threads", 3)  # fmt: skip
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_it_runs_as_its_exact_numbers_do(made, tmp_path):
    folder = made("llama", 4, "bf16")
    exact = command("quantize", folder, "-o", tmp_path / "mlx", "--transcode", "--format", "mlx", "--threads", 1)
    assert exact.returncode == 0, exact.stderr
    ours = bittern.load(folder, activations="float", threads=1).logits(TOKENS, kv="f32")
    mlx = bittern.load(tmp_path / "mlx", activations="float", threads=1).logits(TOKENS, kv="f32")
    np.testing.assert_array_equal(ours, mlx)
    ran = command("run", folder, "-p", "abc", "-n", 4, "--threads", 1)
    assert ran.returncode == 0, ran.stderr


def test_what_is_refused(made, tmp_path):
    model = made("llama", 4, "bf16").parent / "llama"

    def run(*flags, source=model):
        return command("quantize", source, "-o", tmp_path / "no", *flags)

    packed = ("--format", "compressed-tensors")
    refused(run("--bits", 7, *packed), 2, "--bits: 7, expected 2, 3, 4, 5, 6 or 8")
    refused(run("--bits", 4, "--group-size", 48, *packed), 2, "--group-size: 48, expected 32, 64 or 128")
    refused(run("--bits", 4, *packed, "--zero-points", "real"), 2, "--zero-points: real, expected integer for --format compressed-tensors")
    refused(run("--bits", 4, *packed, "--method", "mlx"), 2, "--method mlx: makes biases of its own, expected minmax, lsq or gptq")
    refused(run("--dequantize", "f16", *packed), 2, "--dequantize writes plain numbers, expected --format safetensors")
    refused(run("--bits", 4, "--format", "gguf", "--zero-points", "integer"), 2, "--zero-points: the format is gguf")
    refused(run("--bits", 4, "--zero-points", "1"), 2, "--zero-points: 1, expected real or integer")
    refused(run("--bits", 8, *packed, source=made("llama", 4, "bf16")), 2, "is quantised already (4 bit, group 32, BF16)")
    assert not list(tmp_path.iterdir())


# ---- peers ----


def loaded(folder, dtype):
    import torch
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    network, told = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, output_loading_info=True, quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"]
    weights = {
        f"{name}.weight": module.weight.detach().to(torch.float32).numpy()
        for name, module in network.named_modules()
        if hasattr(module, "quantization_scheme")
    }
    with torch.no_grad():
        logits = network(torch.tensor([TOKENS])).logits[0].to(torch.float32).numpy()
    return weights, logits


@pytest.mark.peer("torch", "transformers", "compressed_tensors")
@pytest.mark.parametrize("name, bits, dtype", KINDS)
def test_transformers_has_our_weights_and_logits(made, tmp_path, show, name, bits, dtype):
    import torch

    folder = made(name, bits, dtype)
    stored = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[dtype]
    plain = numbers(folder, tmp_path / "plain", "--dequantize", "f32")
    exact = command("quantize", folder, "-o", tmp_path / "mlx", "--transcode", "--format", "mlx", "--threads", 1)
    assert exact.returncode == 0, exact.stderr
    exact = numbers(tmp_path / "mlx", tmp_path / "exact", "--dequantize", "f32", "--format", "safetensors")
    # Decompressed in the scales' dtype, each weight is rounded to it; in f32, it is what bittern's products take.
    for as_dtype, ours in ((stored, plain), (torch.float32, exact)):
        weights, logits = loaded(folder, as_dtype)
        assert len(weights) >= 14
        for key, weight in weights.items():
            np.testing.assert_array_equal(weight, ours[key], err_msg=key)
    own = bittern.load(folder, activations="float", threads=1).logits(TOKENS, kv="f32")
    error = np.abs(own - logits).max() / np.abs(logits).max()
    show(f"{name}, {bits} bits, {dtype}: logits within {error:.1e} of transformers")
    assert error < 1e-5


@pytest.mark.peer("torch", "transformers", "compressed_tensors")
def test_transformers_has_what_was_learned(made, tmp_path):
    import torch

    text = "".join(chr(97 + i * i * 7 % 26) + " " * (i % 5 == 0) for i in range(1600))
    (tmp_path / "text.txt").write_text(text)
    source = made("llama", 4, "bf16").parent / "llama"
    report = bittern.distill(source, tmp_path / "out", data=tmp_path / "text.txt", format="compressed-tensors", bits=4,
                             group_size=32, context=32, calibration=16, validation=4, steps=4, rate=0.001, threads=1)  # fmt: skip
    assert report.kl < report.start_kl and report.written_kl == report.kl
    weights, _ = loaded(tmp_path / "out", torch.bfloat16)
    plain = numbers(tmp_path / "out", tmp_path / "plain", "--dequantize", "f32")
    assert len(weights) == 14
    for key, weight in weights.items():
        np.testing.assert_array_equal(weight, plain[key], err_msg=key)


@pytest.mark.peer("torch", "transformers", "compressed_tensors")
@pytest.mark.parametrize("symmetric", [False, True])
def test_we_run_what_the_package_packs(made, tmp_path, symmetric):
    """A model that the package compressed, as transformers loads it without being asked for more."""
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    source = made("llama", 4, "bf16").parent / "llama"
    scheme = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(num_bits=4, symmetric=symmetric, strategy="group", group_size=32)
    )
    package = BaseCompressor.get_value_from_registry("pack-quantized")
    tensors = {}
    for name, w in load_file(source / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = w
            continue
        groups = w.float().unflatten(-1, (-1, 32))
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scale = (2 * torch.maximum(high, -low) if symmetric else high - low) / 15
        state = {"weight": w, "weight_scale": scale.to(w.dtype)}
        if not symmetric:
            state["weight_zero_point"] = (-8 - low / scale).round().clamp(-8, 7).to(torch.int8)
        for part, value in package.compress(state, scheme).items():
            tensors[name.removesuffix("weight") + part] = value.contiguous()
    folder = tmp_path / "packed"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())}, "ignore": ["lm_head"],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = network(torch.tensor([TOKENS])).logits[0].numpy()
    ours = bittern.load(folder, activations="float", threads=1).logits(TOKENS, kv="f32")
    assert np.abs(ours - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.peer("torch", "transformers", "compressed_tensors")
def test_transformers_has_the_bits_of_every_rule(made, tmp_path):
    """Config groups by name, beside the one of all linear layers; and a head that is packed."""
    import torch

    folder = made("qwen2", 4, "f32", "--override", "down_proj=8", "--override", "layers.0.self_attn=6:32", "--override", "gate_proj=keep")
    weights, _ = loaded(folder, torch.float32)
    plain = numbers(folder, tmp_path / "plain", "--dequantize", "f32")
    for key, weight in weights.items():
        np.testing.assert_array_equal(weight, plain[key], err_msg=key)
    assert not any("gate_proj" in key for key in weights) and any("down_proj" in key for key in weights)


@pytest.mark.peer("torch", "compressed_tensors")
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("symmetric", [False, True])
def test_we_read_what_the_package_packs(tmp_path, bits, symmetric):
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    torch.manual_seed(bits)
    args = QuantizationArgs(num_bits=bits, symmetric=symmetric, strategy="group", group_size=32)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    state = {"weight": torch.randn(37, 96), "weight_scale": torch.rand(37, 3) / 2**bits + 0.01}
    if not symmetric:
        state["weight_zero_point"] = torch.randint(low, high + 1, (37, 3), dtype=torch.int8)
    state = {k: v.to(torch.bfloat16) if v.is_floating_point() else v for k, v in state.items()}
    package = BaseCompressor.get_value_from_registry("pack-quantized")
    packed = package.compress(state, scheme)
    expected = package.decompress(packed, scheme)["weight"].float().numpy()
    folder = tmp_path / "packed"
    folder.mkdir()
    from safetensors.torch import save_file

    save_file({f"layer.{k}": v.contiguous() for k, v in packed.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({
        "model_type": "nobodys",
        "quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized",
                                "config_groups": {"group_0": json.loads(scheme.model_dump_json())}},
    }))  # fmt: skip
    ours = numbers(folder, tmp_path / "plain", "--dequantize", "f32")["layer.weight"]
    np.testing.assert_array_equal(ours, expected)
