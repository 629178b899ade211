#include "bittern/ops/gdn_decode_step.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/gdn/gdn_decode_step/gdn_decode_step_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "cpu/silu-inl.h"
#include "ops/gdn/gdn_step-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using Op = GdnDecodeStep;
using gdn_step::D;
using gdn_step::kLanes;
using gdn_step::Narrow;
using gdn_step::Token;
using gdn_step::V;
using gdn_step::Widen;

// The first n elements, and zeros.
template <class X>
HWY_INLINE V LoadSome(const X* from, std::int64_t n) {
  if (HWY_LIKELY(n >= kLanes)) return LoadMath(D(), from);
  X padded[kLanes] = {};
  std::copy_n(from, n, padded);
  return LoadMath(D(), padded);
}

// K numbers for each of kLanes channels, [channel][K] in memory.
template <int K>
HWY_INLINE void LoadColumns(const float* from, V (&to)[K]) {
  const D d;
  if constexpr (K == 1) {
    to[0] = hn::Load(d, from);
  } else if constexpr (K == 2) {
    hn::LoadInterleaved2(d, from, to[0], to[1]);
  } else if constexpr (K == 3) {
    hn::LoadInterleaved3(d, from, to[0], to[1], to[2]);
  } else {
    hn::LoadInterleaved4(d, from, to[0], to[1], to[2], to[3]);
  }
}
template <int K>
HWY_INLINE void StoreColumns(const V (&from)[K], float* to) {
  const D d;
  if constexpr (K == 1) {
    hn::Store(from[0], d, to);
  } else if constexpr (K == 2) {
    hn::StoreInterleaved2(from[0], from[1], d, to);
  } else {
    hn::StoreInterleaved3(from[0], from[1], from[2], d, to);
  }
}

// n silu(x), or silu(x), rounded to X.
template <class X>
HWY_INLINE V SiluRounded(V x, const V* n = nullptr) {
  const D d;
  if constexpr (std::is_same_v<X, bf16>) {
    const hn::RebindToUnsigned<D> du;
    const V one[1] = {x};
    hn::Vec<decltype(du)> bits[1];
    SiluToBf16(d, one, n, bits);
    return hn::BitCast(d, hn::And(bits[0], hn::Set(du, 0xffff0000u)));
  } else {
    const V silu = Silu(d, x);
    return RoundMath<X>(d, n == nullptr ? silu : hn::Mul(*n, silu));
  }
}

template <class X, int kWidth>
struct Layer {
  static constexpr int kReach = kWidth - 1;
  const Op::Desc& d;
  const Op::Args& a;
  GdnStepDesc step;
  GdnDesc heads;
  std::int64_t stride;  // from row to row of a state
  bool stream;
  Token tokens[Op::kMostTokens];

  Layer(const Op::Desc& desc, const Op::Args& args)
      : d(desc),
        a(args),
        step(desc.step()),
        heads(step.heads()),
        stride(args.state.stride[2]),
        stream(args.snapshots && args.snapshots.shape.numel() * 4 >= kStreamBytes) {
    std::fill_n(tokens, d.tokens, Token{});
  }

  // Channels [channel, channel + count) of all tokens, to the rows `row` of them; conv_state moves
  // on.
  void Convolve(std::int64_t sequence, std::int64_t slot, std::int64_t channel, std::int64_t count,
                float (Token::*row)[gdn_step::kMaxDim]) {
    const D tag;
    const std::int64_t apart = a.conv_state.stride[1], older = a.conv_state.stride[2];
    const bool dense = apart == kReach && (older == 1 || kReach == 1);
    alignas(64) float part[kLanes * 4] = {};
    for (std::int64_t c = 0; c < count; c += kLanes) {
      const std::int64_t n = std::min(kLanes, count - c), first = channel + c;
      V tap[kWidth], before[kReach];
      Widen(a.conv_weight.as<X>() + first * kWidth, n * kWidth, part);
      LoadColumns(part, tap);
      X* const state = a.conv_state.as<X>() + a.conv_state.at(slot, first);
      if (dense) {
        Widen(state, n * kReach, part);
      } else {
        for (std::int64_t i = 0; i < n; ++i)
          for (std::int64_t j = 0; j < kReach; ++j)
            part[i * kReach + j] = to_math(state[i * apart + j * older]);
      }
      LoadColumns(part, before);
      const V bias = a.conv_bias ? LoadSome(a.conv_bias.as<X>() + first, n) : hn::Zero(tag);
      for (std::int64_t t = 0; t < d.tokens; ++t) {
        const V x = LoadSome(a.x.as<X>() + a.x.at(sequence, t) + first, n);
        V u = bias;
        for (int j = 0; j < kReach; ++j) u = hn::MulAdd(tap[j], before[j], u);
        u = hn::MulAdd(tap[kReach], x, u);
        hn::Store(SiluRounded<X>(u), tag, (tokens[t].*row) + c);
        for (int j = 0; j + 1 < kReach; ++j) before[j] = before[j + 1];
        before[kReach - 1] = x;
        if (!a.conv_snapshots) continue;
        StoreColumns(before, part);
        Narrow(part, n * kReach,
               a.conv_snapshots.as<X>() + a.conv_snapshots.at(sequence, t, first));
      }
      StoreColumns(before, part);
      if (dense) {
        Narrow(part, n * kReach, state);
      } else {
        for (std::int64_t i = 0; i < n; ++i)
          for (std::int64_t j = 0; j < kReach; ++j)
            state[i * apart + j * older] = from_math<X>(part[i * kReach + j]);
      }
    }
  }

  // y from a token's o.
  void GateOutput(std::int64_t sequence, std::int64_t t, std::int64_t head) {
    const D tag;
    const bool each = d.rounding == NormRounding::each;
    float* const o = tokens[t].o;
    for (std::int64_t j = 0; j < d.value_dim; j += kLanes)
      hn::Store(RoundMath<X>(tag, hn::Load(tag, o + j)), tag, o + j);
    const float mean = Dot(o, o, d.value_dim) / static_cast<float>(d.value_dim);
    const V rstd = hn::Set(tag, 1.0f / std::sqrt(mean + static_cast<float>(d.eps)));
    const X* z = a.z.as<X>() + a.z.at(sequence, t, head);
    for (std::int64_t j = 0; j < d.value_dim; j += kLanes) {
      const std::int64_t n = d.value_dim - j;
      V weighted = hn::Mul(hn::Load(tag, o + j), rstd);
      if (each) weighted = RoundMath<X>(tag, weighted);
      weighted = hn::Mul(weighted, LoadSome(a.norm_weight.as<X>() + j, n));
      if (each) weighted = RoundMath<X>(tag, weighted);
      hn::Store(SiluRounded<X>(LoadSome(z + j, n), &weighted), tag, o + j);
    }
    Narrow(o, d.value_dim, a.y.as<X>() + a.y.at(sequence, t, head));
  }

  // A key head of a sequence, and the value heads that use it. `next` is the state to come.
  void Run(std::int64_t sequence, std::int64_t slot, std::int64_t key_head, const float* next) {
    Convolve(sequence, slot, d.q_channel(key_head), d.key_dim, &Token::q);
    Convolve(sequence, slot, d.k_channel(key_head), d.key_dim, &Token::k);
    for (std::int64_t t = 0; t < d.tokens; ++t) gdn_step::PrepareKeys(step, tokens[t]);
    const std::int64_t turns = d.value_heads / d.key_heads;
    for (std::int64_t i = 0; i < turns; ++i) {
      const std::int64_t head = heads.value_head(key_head, i);
      float* const state = StateOf(slot, head);
      const float* const after =
          i + 1 < turns ? StateOf(slot, heads.value_head(key_head, i + 1)) : next;
      Convolve(sequence, slot, d.v_channel(head), d.value_dim, &Token::v);
      for (std::int64_t t = 0; t < d.tokens; ++t) {
        Token& token = tokens[t];
        const float g = to_math(a.g.as<X>()[a.g.at(sequence, t, head)]);
        const float beta = to_math(a.beta.as<X>()[a.beta.at(sequence, t, head)]);
        token.decay =
            math::exp(gdn_log_decay(g, a.a_log.as<float>()[head], a.dt_bias.as<float>()[head]));
        token.beta = gdn_strength(heads, beta);
        gdn_step::Step(step, stride, state, t + 1 < d.tokens ? state : after, token);
        GateOutput(sequence, t, head);
        if (!a.snapshots) continue;
        float* to = a.snapshots.as<float>() + a.snapshots.at(sequence, t, head);
        gdn_step::StoreSnapshot(step, stride, state, to, stream);
      }
    }
  }
  float* StateOf(std::int64_t slot, std::int64_t head) const {
    return a.state.as<float>() + a.state.at(slot, head);
  }

  // What they give without a state.
  void Skip(std::int64_t sequence, std::int64_t key_head) const {
    const X zero = from_math<X>(0.0f);
    for (std::int64_t t = 0; t < d.tokens; ++t) {
      const auto clear = [&](std::int64_t channel, std::int64_t count) {
        if (!a.conv_snapshots) return;
        std::fill_n(a.conv_snapshots.as<X>() + a.conv_snapshots.at(sequence, t, channel),
                    count * kReach, zero);
      };
      clear(d.q_channel(key_head), d.key_dim);
      clear(d.k_channel(key_head), d.key_dim);
      for (std::int64_t i = 0; i < d.value_heads / d.key_heads; ++i) {
        const std::int64_t head = heads.value_head(key_head, i);
        clear(d.v_channel(head), d.value_dim);
        std::fill_n(a.y.as<X>() + a.y.at(sequence, t, head), d.value_dim, zero);
        if (a.snapshots)
          std::fill_n(a.snapshots.as<float>() + a.snapshots.at(sequence, t, head),
                      d.key_dim * d.value_dim, 0.0f);
      }
    }
  }

  // Items [begin, end): the key heads of all sequences.
  void Run(std::int64_t begin, std::int64_t end) {
    const auto slot_of = [&](std::int64_t i) {
      const std::int64_t sequence = i / d.key_heads;
      return d.pool > 0 ? std::int64_t{a.state_index.as<std::int32_t>()[sequence]} : sequence;
    };
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t key_head = i % d.key_heads, slot = slot_of(i);
      if (slot < 0) {
        Skip(i / d.key_heads, key_head);
        continue;
      }
      // Only to be fetched ahead: any state will do.
      const std::int64_t ahead = std::min(i + 1, end - 1), other = slot_of(ahead);
      const float* next =
          StateOf(other < 0 ? slot : other, heads.value_head(ahead % d.key_heads, 0));
      Run(i / d.key_heads, slot, key_head, next);
    }
    if (stream) hwy::FlushStream();
  }
};

void RunGdnDecodeStep(const Op::Desc& d, const Op::Args& a, std::int64_t begin, std::int64_t end) {
  (void)visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
    if (d.width == 2) {
      Layer<X, 2>(d, a).Run(begin, end);
    } else if (d.width == 3) {
      Layer<X, 3>(d, a).Run(begin, end);
    } else {
      Layer<X, 4>(d, a).Run(begin, end);
    }
    return Status();
  });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD

#if HWY_ONCE
namespace bittern {
namespace {

using Op = GdnDecodeStep;
BITTERN_EXPORT(RunGdnDecodeStep);

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  const std::int64_t heads = d.value_heads / d.key_heads;
  const std::int64_t work = heads * d.key_dim * d.value_dim * std::max<std::int64_t>(d.tokens, 1);
  cpu::parallel(d.batch * d.key_heads, cpu::kGrain / work,
                [&](std::int64_t begin, std::int64_t end) {
                  BITTERN_CALL(RunGdnDecodeStep)(d, a, begin, end);
                });
  return {};
}

constexpr Kernel<Op> kKernels[] = {cpu::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<GdnDecodeStep>> gdn_decode_step_cpu() { return kKernels; }

}  // namespace bittern
#endif  // HWY_ONCE
