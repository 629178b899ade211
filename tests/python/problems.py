"""Inputs of ops, drawn at random."""

import pathlib

import numpy as np

import bittern

rng = np.random.default_rng(6)
BITS = 4
PACKAGE = str(pathlib.Path(bittern.__file__).parents[1])


def tables(dim=64, bits=BITS):
    levels, boundaries = bittern.sphere_codebook(dim, bits)
    return bittern.make_rotation("hadamard", dim, 1), boundaries, levels


def normal(*shape):
    return rng.normal(size=shape).astype(np.float32)


def gdn_problem(b=2, t=5, kh=2, vh=4, kd=16, vd=8):
    q, k = normal(b, t, kh, kd), normal(b, t, kh, kd)
    g, beta = -rng.random((b, t, vh)).astype(np.float32), rng.random((b, t, vh)).astype(np.float32)
    return {"q": q, "k": k, "v": normal(b, t, vh, vd), "g": g, "beta": beta}
