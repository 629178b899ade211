// A task is a KV head with a block of queries. Threads take whole tasks, or, where tasks are few,
// the splits of all of them. The parts, from the inside out: rows-inl.h, passes-inl.h, int8-inl.h,
// split-inl.h.
#include <limits>

#include "bittern/ops/aura_attention.h"
#include "cpu/dispatch.h"
#include "cpu/parallel.h"
#include "ops/aura/aura_attention/work.h"
#include "plan/kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/aura/aura_attention/aura_attention_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "ops/aura/aura_attention/split-inl.h"
#include "ops/aura/rotate-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

// KV head and queries of a task. The rows of a task are consecutive records.
struct Task {
  std::int64_t s, head, query, queries;
  std::int64_t first_row, rows;

  Task(const Work& w, std::int64_t index) {
    const std::int64_t block = index % w.query_blocks(), at = index / w.query_blocks();
    s = at / w.d.kv_heads;
    head = at % w.d.kv_heads;
    query = block * w.queries_at_once();
    queries = std::min(w.queries_at_once(), w.d.queries - query);
    first_row = (at * w.d.queries + query) * w.d.group();
    rows = queries * w.d.group();
  }
  std::int64_t query_of(const Work& w, std::int64_t row) const { return query + row / w.d.group(); }
  // The row of q and out, in elements.
  std::int64_t offset(const Work& w, const ConstView& view, std::int64_t row) const {
    const std::int64_t h = head * w.d.group() + row % w.d.group();
    return view.at(s, query_of(w, row), h);
  }
};

float Dot(const float* a, const float* b, std::int64_t dim) {
  HWY_ALIGN float acc[kUnit] = {};
  for (std::int64_t j = 0; j < dim; ++j) acc[j % kUnit] = std::fma(a[j], b[j], acc[j % kUnit]);
  for (std::int64_t stride = kUnit / 2; stride > 0; stride /= 2)
    for (std::int64_t i = 0; i < stride; ++i) acc[i] += acc[i + stride];
  return acc[0];
}

// Element j of a coded row in units.
std::int64_t CodedPosition(std::int64_t j) { return j / 128 * 128 + j % 8 * kUnit + j / 8 % kUnit; }

// The queries of a task in both bases, and empty states.
void Prepare(const Work& w, const Task& task) {
  const auto& d = w.d;
  const float scale = d.softmax_scale();
  const RowRotation rotation(d.k_rotation, d.dim, w.a.k_table.as<float>());
  const auto dim = d.dim;
  for (std::int64_t n = 0; n < task.rows; n += kRowsAtOnce) {
    const std::int64_t count = std::min(kRowsAtOnce, task.rows - n);
    HWY_ALIGN float rotated[kRowsAtOnce][kAuraMaxDim];
    for (std::int64_t i = 0; i < count; ++i) {
      const Record row(w, task.first_row + n + i);
      std::fill_n(row.a, w.record_length(), 0.0f);
      (void)visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
        const X* q = w.a.q.as<X>() + task.offset(w, w.a.q, n + i);
        for (std::int64_t j = 0; j < dim; ++j) row.a[j] = to_math(q[j]) * scale;
        return Status();
      });
      std::copy_n(row.a, dim, rotated[i]);
    }
    rotation.Apply(rotated[0], kAuraMaxDim, count, false);
    for (std::int64_t i = 0; i < count; ++i) {
      Record row(w, task.first_row + n + i);
      for (std::int64_t j = 0; j < dim; ++j) row.r[CodedPosition(j)] = rotated[i][j];
      const bool sink = w.a.sinks.data != nullptr;
      row.m = sink ? w.a.sinks.as<float>()[task.head * d.group() + (n + i) % d.group()]
                   : -std::numeric_limits<float>::infinity();
      row.l = sink ? 1.0f : 0.0f;
      if (w.a.k_mean) row.b = Dot(row.a, w.a.k_mean.as<float>() + task.head * dim, dim);
      if (w.int8) MakeBytes(w, row);
    }
  }
}

// The outputs of a task from its states.
void Finish(const Work& w, const Task& task) {
  const auto& d = w.d;
  const RowRotation rotation(d.v_rotation, d.dim, w.a.v_table.as<float>());
  for (std::int64_t n = 0; n < task.rows; n += kRowsAtOnce) {
    const std::int64_t count = std::min(kRowsAtOnce, task.rows - n);
    HWY_ALIGN float u[kRowsAtOnce][kAuraMaxDim];
    for (std::int64_t i = 0; i < count; ++i) {
      const Record row(w, task.first_row + n + i);
      for (std::int64_t j = 0; j < d.dim; ++j) u[i][j] = row.o_coded[CodedPosition(j)];
    }
    rotation.Apply(u[0], kAuraMaxDim, count, true);
    for (std::int64_t i = 0; i < count; ++i) {
      const Record row(w, task.first_row + n + i);
      if (w.a.v_mean) {
        const float* mean = w.a.v_mean.as<float>() + task.head * d.dim;
        for (std::int64_t j = 0; j < d.dim; ++j) u[i][j] = std::fma(row.l_coded, mean[j], u[i][j]);
      }
      (void)visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
        X* out = w.a.out.as<X>() + task.offset(w, w.a.out, n + i);
        for (std::int64_t j = 0; j < d.dim; ++j)
          out[j] = from_math<X>(row.l == 0 ? 0.0f : (u[i][j] + row.o_exact[j]) / row.l);
        return Status();
      });
    }
  }
}

// Split `split` of a region by all rows of the task; merged(row, partial) follows for each row that
// saw a token of it. to(row) is where its sums go.
template <class To, class Merged>
void RunSplit(const Work& w, Worker& worker, const Task& task, const aura::Sequence& sequence,
              aura::Region region, std::int64_t split, const To& to, const Merged& merged) {
  const auto seen_by = [&](std::int64_t row) {
    const aura::Span all = sequence.seen(w.d, task.query_of(w, row), region);
    return aura::Span{std::max(all.begin, split * kSplit), std::min(all.end, (split + 1) * kSplit)};
  };
  for (std::int64_t row = 0, next; row < task.rows; row = next) {
    const aura::Span seen = seen_by(row);
    for (next = row + 1; next < task.rows && next < row + kRowsAtOnce && seen_by(next) == seen;)
      ++next;
    if (seen.empty()) continue;
    float* partials[kRowsAtOnce];
    for (std::int64_t r = row; r < next; ++r) partials[r - row] = to(r);
    worker.Split(task.s, task.head, sequence, region, seen, task.first_row + row, next - row,
                 partials);
    for (std::int64_t r = row; r < next; ++r) merged(r, Partial(partials[r - row]));
  }
}

constexpr aura::Region kInOrder[] = {aura::kFirst, aura::kCoded, aura::kRecent};

// Whole tasks: splits are merged as they come.
void RunTasks(const Work& w, std::int64_t begin, std::int64_t end) {
  Worker worker(w);
  HWY_ALIGN float sums[kRowsAtOnce][kUnit + kAuraMaxDim];
  for (std::int64_t index = begin; index < end; ++index) {
    const Task task(w, index);
    const aura::Sequence sequence(w.d, w.a, task.s);
    Prepare(w, task);
    for (const aura::Region region : kInOrder) {
      const std::int64_t splits = (sequence.tokens[region] + kSplit - 1) / kSplit;
      for (std::int64_t split = 0; split < splits; ++split) {
        RunSplit(
            w, worker, task, sequence, region, split,
            [&](std::int64_t row) { return sums[row % kRowsAtOnce]; },
            [&](std::int64_t row, const Partial& partial) {
              Record state(w, task.first_row + row);
              Merge(w, region, partial, state);
            });
      }
    }
    Finish(w, task);
  }
}

// Few tasks: every (task, split) leaves its sums in the workspace...
void PrepareTasks(const Work& w, std::int64_t begin, std::int64_t end) {
  for (std::int64_t index = begin; index < end; ++index) Prepare(w, Task(w, index));
}
void RunSplits(const Work& w, std::int64_t begin, std::int64_t end) {
  Worker worker(w);
  for (std::int64_t at = begin; at < end; ++at) {
    const Task task(w, at / w.all_splits());
    const aura::Sequence sequence(w.d, w.a, task.s);
    const std::int64_t split = at % w.all_splits();
    std::int64_t in_region = split;
    aura::Region region = aura::kFirst;
    for (const aura::Region r : kInOrder) {
      region = r;
      if (in_region < w.splits(r)) break;
      in_region -= w.splits(r);
    }
    for (std::int64_t row = 0; row < task.rows; ++row)
      Partial(w.partial(task.first_row + row, split)).seen = 0;
    RunSplit(
        w, worker, task, sequence, region, in_region,
        [&](std::int64_t row) { return w.partial(task.first_row + row, split); },
        [](std::int64_t, const Partial&) {});
  }
}
// ... which are merged afterwards, in the same order.
void FinishTasks(const Work& w, std::int64_t begin, std::int64_t end) {
  for (std::int64_t index = begin; index < end; ++index) {
    const Task task(w, index);
    for (std::int64_t row = task.first_row; row < task.first_row + task.rows; ++row) {
      Record state(w, row);
      std::int64_t split = 0;
      for (const aura::Region region : kInOrder) {
        for (std::int64_t n = 0; n < w.splits(region); ++n, ++split) {
          const Partial partial(w.partial(row, split));
          if (partial.seen != 0) Merge(w, region, partial, state);
        }
      }
    }
    Finish(w, task);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD

#if HWY_ONCE
namespace bittern {
namespace {

using Op = AuraAttention;
using aura::kSplit;
using aura::Work;
BITTERN_EXPORT(RunTasks);
BITTERN_EXPORT(PrepareTasks);
BITTERN_EXPORT(RunSplits);
BITTERN_EXPORT(FinishTasks);

Status supports(const Op::Desc&, Device) { return cpu::supported(); }
Status supports_int8(const Op::Desc& d, Device) {
  if (d.k_bits != 4) return unsupported("k_bits: " + std::to_string(d.k_bits) + ", expected 4");
  return cpu::supported();
}

template <bool kInt8>
std::size_t workspace(const Op::Desc& d, Device) {
  const Op::Args none;
  const Work w{d, none, kInt8, nullptr, nullptr};
  return static_cast<std::size_t>(w.rows() * w.record_length() + w.partials_length()) *
         sizeof(float);
}

template <bool kInt8>
Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace workspace) {
  Work w{d, a, kInt8, static_cast<float*>(workspace.data), nullptr};
  w.partials = w.records + w.rows() * w.record_length();
  const std::int64_t tokens = std::max<std::int64_t>(d.first + d.capacity + d.recent, 1);
  const auto share = [&](std::int64_t of) {  // tasks that are worth another thread
    return std::max<std::int64_t>(cpu::kGrain / std::max<std::int64_t>(of, 1), 1);
  };
  const std::int64_t row_work = d.group() * w.queries_at_once() * d.dim;
  if (!w.by_split()) {
    cpu::parallel(w.tasks(), share(row_work * tokens), [&](std::int64_t begin, std::int64_t end) {
      BITTERN_CALL(RunTasks)(w, begin, end);
    });
    return {};
  }
  cpu::parallel(w.tasks(), share(row_work), [&](std::int64_t begin, std::int64_t end) {
    BITTERN_CALL(PrepareTasks)(w, begin, end);
  });
  cpu::parallel(
      w.tasks() * w.all_splits(), share(row_work * kSplit),
      [&](std::int64_t begin, std::int64_t end) { BITTERN_CALL(RunSplits)(w, begin, end); });
  cpu::parallel(w.tasks(), share(row_work), [&](std::int64_t begin, std::int64_t end) {
    BITTERN_CALL(FinishTasks)(w, begin, end);
  });
  return {};
}

// AVX2 takes V's codes as the exact kernel does, so the bits depend on the target.
PrecisionGuarantee int8_guarantee(const Op::Desc&) {
  return {.math_precision = DType::s8,
          .accumulator = DType::s32,
          .bit_stable_on_same_hardware = false,
          .same_bits_on_all_backends = false,
          .error_norm = ErrorNorm::terms,
          .error_bound = 1.0 / 32512};
}

constexpr Kernel<Op> kKernels[] = {{.name = "cpu_int8",
                                    .backend = "cpu",
                                    .weaker = int8_guarantee,
                                    .supports = supports_int8,
                                    .workspace = workspace<true>,
                                    .architecture = cpu::architecture,
                                    .run = run<true>},
                                   {.name = "cpu",
                                    .backend = "cpu",
                                    .supports = supports,
                                    .workspace = workspace<false>,
                                    .architecture = cpu::architecture,
                                    .run = run<false>}};

}  // namespace

std::span<const Kernel<AuraAttention>> aura_attention_cpu() { return kKernels; }

}  // namespace bittern
#endif
