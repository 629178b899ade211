"""What a compressed KV cache costs a model of transformers: KL from the plain cache, and memory.

    python examples/aura_cache.py MODEL TEXT [--tokens 512] [--bits 2 3 4 6 8] [--first 0] [--recent 0]

MODEL is a folder of Hugging Face's, or a GGUF file (it is written as a folder first); TEXT is a
file. One line for each pair of bits of K and V: the mean KL of the next token's distribution in
nats, how often the likeliest token is the same, and the memory of the cache. CUDA is used if there
is one.
"""

import argparse
import pathlib
import tempfile

import torch
import transformers

import bittern
from bittern.transformers import AuraCache


@torch.no_grad()
def log_probabilities(model, tokens, cache=None):
    logits = model(tokens, past_key_values=cache, use_cache=cache is not None).logits
    return logits[0].float().log_softmax(-1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("text", type=pathlib.Path)
    parser.add_argument("--tokens", type=int, default=512, help="tokens of the text (default 512)")
    parser.add_argument("--bits", type=int, nargs="+", default=[2, 3, 4, 6, 8])
    parser.add_argument("--first", type=int, default=0, help="first tokens kept in bf16")
    parser.add_argument("--recent", type=int, default=0, help="newest tokens kept in bf16")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        path = arguments.model
        if path.endswith(".gguf"):
            path = f"{folder}/model"
            bittern.quantize_model(arguments.model, path, dequantize="f32")
        dtype = getattr(torch, arguments.dtype)
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = bittern.Tokenizer(arguments.model)
    ids = tokenizer.encode(arguments.text.read_text())[: arguments.tokens]
    tokens = torch.tensor(ids, dtype=torch.int64, device=model.device)[None]

    plain = log_probabilities(model, tokens)
    print(f"{tokens.shape[1]} tokens, {arguments.dtype} on {model.device.type}")
    print("K bits  V bits      KL   same token   bytes   of plain")
    for k_bits in arguments.bits:
        for v_bits in arguments.bits:
            regions = {"first": arguments.first, "recent": arguments.recent}
            cache = AuraCache(model.config, f"aura{k_bits}v{v_bits}", **regions)
            coded = log_probabilities(model, tokens, cache)
            kl = (plain.exp() * (plain - coded)).sum(-1).mean().item()
            same = (plain.argmax(-1) == coded.argmax(-1)).float().mean().item()
            share = cache.nbytes / cache.plain_nbytes
            print(f"{k_bits:6}  {v_bits:6}  {kl:.4f}   {same:10.1%}  {cache.nbytes:6}   {share:8.1%}", flush=True)


if __name__ == "__main__":
    main()
