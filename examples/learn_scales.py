"""Learns the scales and zero points of a layer's 4-bit weights, so that its output loses less.

    python examples/learn_scales.py [cpu | cuda]
"""

import sys

import torch

import bittern.torch

GROUP, LOW, HIGH = 64, -8, 7


def main(device):
    torch.manual_seed(0)
    weight = torch.randn(256, 512, device=device) / 512**0.5
    inputs = torch.randn(1024, 512, device=device) * torch.linspace(0.1, 3, 512, device=device)
    target = inputs @ weight.T

    groups = weight.reshape(256, -1, GROUP)
    scale = (groups.abs().amax(-1) / HIGH).requires_grad_()
    zero_point = torch.zeros_like(scale).requires_grad_()
    optimizer = torch.optim.Adam(
        [{"params": [scale], "lr": 2e-4}, {"params": [zero_point], "lr": 1e-2}]
    )
    first = None
    for step in range(101):
        quantized = bittern.torch.fake_quantize_per_group(
            weight, scale, zero_point, group_size=GROUP, q_min=LOW, q_max=HIGH
        )
        loss = (inputs @ quantized.T - target).square().mean() / target.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        first = first or loss.item()
        if step % 25 == 0:
            print(f"step {step:3}: {100 * loss.item():.3f} % of the output's energy is lost")
    return 0 if loss.item() < first else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "cpu"))
