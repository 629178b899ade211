// A task is a KV head with a block of queries. Threads take whole tasks, or, where tasks are few,
// the splits of all of them. The parts, from the inside out: rows-inl.h, passes-inl.h, int8-inl.h,
// block-inl.h, split-inl.h.
#include <limits>
#include <vector>

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
    // The last queries first: they see the most tokens.
    const std::int64_t heads = w.d.sequences * w.d.kv_heads;
    const std::int64_t block = w.query_blocks() - 1 - index / heads, at = index % heads;
    s = at / w.d.kv_heads;
    head = at % w.d.kv_heads;
    query = block * w.queries_at_once();
    queries = std::min(w.queries_at_once(), w.d.queries - query);
    first_row = w.by_split() ? (at * w.d.queries + query) * w.d.group() : 0;
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
    if (w.coded_length() != 0) rotation.Apply(rotated[0], kAuraMaxDim, count, false);
    for (std::int64_t i = 0; i < count; ++i) {
      Record row(w, task.first_row + n + i);
      for (std::int64_t j = 0; w.coded_length() != 0 && j < dim; ++j)
        row.r[CodedPosition(j)] = rotated[i][j];
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
      for (std::int64_t j = 0; j < d.dim; ++j)
        u[i][j] = w.coded_length() != 0 ? row.o_coded[CodedPosition(j)] : 0.0f;
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

// The part of a split that a query sees.
aura::Span SeenInSplit(const Work& w, const aura::Sequence& sequence, aura::Region region,
                       std::int64_t split, std::int64_t query) {
  const aura::Span all = sequence.seen(w.d, query, region);
  return {std::max(all.begin, split * kSplit), std::min(all.end, (split + 1) * kSplit)};
}

// Split `split` of a region by all rows of the task. to(row) is where a row's sums go;
// merged(row, count, partials) follows for each few rows.
template <class To, class Merged>
void RunSplit(const Work& w, Worker& worker, const Task& task, const aura::Sequence& sequence,
              aura::Region region, std::int64_t split, const To& to, const Merged& merged) {
  const auto seen_by = [&](std::int64_t row) {
    return SeenInSplit(w, sequence, region, split, task.query_of(w, row));
  };
  float* partials[kRowsAtOnce];
  std::int64_t row = 0;
  if (task.rows >= kManyRows) {
    // The first query sees the first token that any does, and so the last one the last.
    worker.LoadSplit(task.s, task.head, sequence, region,
                     {seen_by(0).begin, seen_by(task.rows - 1).end});
    for (; task.rows - row >= kManyRows; row += kRowsAtOnce) {
      const std::int64_t count = std::min(kRowsAtOnce, task.rows - row);
      for (std::int64_t r = 0; r < count; ++r) partials[r] = to(row + r);
      worker.Block(region, task.first_row, row, count, seen_by, partials);
      merged(row, count, partials);
    }
  }
  for (std::int64_t next; row < task.rows; row = next) {
    const aura::Span seen = seen_by(row);
    for (next = row + 1; next < task.rows && next < row + kRowsAtOnce && seen_by(next) == seen;)
      ++next;
    for (std::int64_t r = row; r < next; ++r) Partial(partials[r - row] = to(r)).seen = 0;
    if (seen.empty()) continue;
    worker.Split(task.s, task.head, sequence, region, seen, task.first_row + row, next - row,
                 partials);
    merged(row, next - row, partials);
  }
}

constexpr aura::Region kInOrder[] = {aura::kFirst, aura::kCoded, aura::kRecent};

// The splits of a region that some query of the task sees.
aura::Span SplitsOf(const Work& w, const Task& task, const aura::Sequence& sequence,
                    aura::Region region) {
  const aura::Span some{sequence.seen(w.d, task.query, region).begin,
                        sequence.seen(w.d, task.query + task.queries - 1, region).end};
  if (some.empty()) return {};
  return {some.begin / kSplit, (some.end + kSplit - 1) / kSplit};
}

// A whole task: splits are merged as they come.
void RunTask(const Work& w, std::int64_t slot, std::int64_t index) {
  Work own = w;
  own.records = w.slot(slot) + w.tiles_length();
  Worker worker(own, w.slot(slot));
  HWY_ALIGN float sums[kRowsAtOnce][kUnit + kAuraMaxDim];
  const Task task(own, index);
  const aura::Sequence sequence(own.d, own.a, task.s);
  Prepare(own, task);
  for (const aura::Region region : kInOrder) {
    const aura::Span splits = SplitsOf(own, task, sequence, region);
    if (splits.empty()) continue;
    if (task.rows >= kManyRows) worker.LoadQueries(region, task.first_row, task.rows);
    for (std::int64_t split = splits.begin; split < splits.end; ++split) {
      RunSplit(
          own, worker, task, sequence, region, split,
          [&](std::int64_t row) { return sums[row % kRowsAtOnce]; },
          [&](std::int64_t row, std::int64_t count, float* const* partials) {
            Merge(own, region, task.first_row + row, count, partials);
          });
    }
  }
  Finish(own, task);
}

// Few tasks: every split of each leaves its sums in the workspace...
void ListSplits(const Work& w, std::vector<SplitOfTask>& splits) {
  for (std::int64_t index = 0; index < w.tasks(); ++index) {
    const Task task(w, index);
    const aura::Sequence sequence(w.d, w.a, task.s);
    for (const aura::Region region : kInOrder) {
      const aura::Span some = SplitsOf(w, task, sequence, region);
      for (std::int64_t split = some.begin; split < some.end; ++split)
        splits.push_back({index, region, split});
    }
  }
}
void PrepareTasks(const Work& w, std::int64_t begin, std::int64_t end) {
  for (std::int64_t index = begin; index < end; ++index) Prepare(w, Task(w, index));
}
void RunSplits(const Work& w, std::int64_t slot, const SplitOfTask* begin, const SplitOfTask* end) {
  Worker worker(w, w.slot(slot));
  for (const SplitOfTask* at = begin; at < end; ++at) {
    const Task task(w, at->task);
    const aura::Sequence sequence(w.d, w.a, task.s);
    if (task.rows >= kManyRows) worker.LoadQueries(at->region, task.first_row, task.rows);
    RunSplit(
        w, worker, task, sequence, at->region, at->split,
        [&](std::int64_t row) { return w.partial(task.first_row + row, *at); },
        [](std::int64_t, std::int64_t, float* const*) {});
  }
}
// ... which are merged afterwards, in the same order.
void FinishTasks(const Work& w, const std::vector<SplitOfTask>& splits, std::int64_t begin,
                 std::int64_t end) {
  for (const SplitOfTask& at : splits) {
    if (at.task < begin || at.task >= end) continue;
    const Task task(w, at.task);
    for (std::int64_t row = 0; row < task.rows; row += kRowsAtOnce) {
      const std::int64_t count = std::min(kRowsAtOnce, task.rows - row);
      float* partials[kRowsAtOnce];
      for (std::int64_t r = 0; r < count; ++r)
        partials[r] = w.partial(task.first_row + row + r, at);
      Merge(w, at.region, task.first_row + row, count, partials);
    }
  }
  for (std::int64_t index = begin; index < end; ++index) Finish(w, Task(w, index));
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
using aura::SplitOfTask;
using aura::Work;
BITTERN_EXPORT(RunTask);
BITTERN_EXPORT(ListSplits);
BITTERN_EXPORT(PrepareTasks);
BITTERN_EXPORT(RunSplits);
BITTERN_EXPORT(FinishTasks);

Status supports(const Op::Desc&, Device) { return cpu::supported(); }
Status supports_int8(const Op::Desc& d, Device) {
  if (d.k_bits != 4) return unsupported("k_bits: " + std::to_string(d.k_bits) + ", expected 4");
  return cpu::supported();
}

// Many rows are multiplied in f32, which is exact.
Work make_work(const Op::Desc& d, const Op::Args& a, bool int8) {
  Work w{d, a, int8, nullptr, nullptr, nullptr};
  w.int8 = int8 && !w.many_rows();
  return w;
}

template <bool kInt8>
std::size_t workspace(const Op::Desc& d, Device) {
  const Op::Args none;
  const Work w = make_work(d, none, kInt8);
  const std::int64_t slots = std::clamp<std::int64_t>(
      num_threads(), 1, std::max<std::int64_t>(w.by_split() ? INT32_MAX : w.tasks(), 1));
  return static_cast<std::size_t>(w.shared_length() + slots * w.slot_length()) * sizeof(float);
}

template <bool kInt8>
Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace workspace) {
  Work w = make_work(d, a, kInt8);
  w.records = static_cast<float*>(workspace.data);
  w.partials = w.records + (w.shared_length() - w.partials_length());
  w.slots = w.records + w.shared_length();
  // The workspace was made when the plan was, perhaps for other threads than now.
  const std::int64_t slots =
      w.slot_length() == 0
          ? INT32_MAX
          : (static_cast<std::int64_t>(workspace.bytes / sizeof(float)) - w.shared_length()) /
                w.slot_length();
  const auto row_work = static_cast<double>(w.task_rows() * d.dim);
  const auto team = [&](double work) {  // slots that are worth a thread
    if (cpu::grain_ignored()) return slots;
    return std::clamp<std::int64_t>(
        static_cast<std::int64_t>(work / static_cast<double>(cpu::grain_now())), 1, slots);
  };
  if (!w.by_split()) {
    const auto tokens = static_cast<double>(d.first + d.capacity + d.recent + 1);
    return cpu::parallel_queue(w.tasks(), team(static_cast<double>(w.tasks()) * row_work * tokens),
                               [&](std::int64_t index, std::int64_t slot) -> Status {
                                 BITTERN_CALL(RunTask)(w, slot, index);
                                 return {};
                               });
  }
  std::vector<SplitOfTask> splits;
  BITTERN_CALL(ListSplits)(w, splits);
  const auto grain = std::max<std::int64_t>(
      static_cast<std::int64_t>(static_cast<double>(cpu::grain_now()) / row_work), 1);
  cpu::parallel(w.tasks(), grain, [&](std::int64_t begin, std::int64_t end) {
    BITTERN_CALL(PrepareTasks)(w, begin, end);
  });
  const auto count = static_cast<std::int64_t>(splits.size());
  cpu::parallel_slots(count, team(static_cast<double>(count * kSplit) * row_work),
                      [&](std::int64_t slot, std::int64_t begin, std::int64_t end) {
                        BITTERN_CALL(RunSplits)
                        (w, slot, splits.data() + begin, splits.data() + end);
                      });
  cpu::parallel(w.tasks(), grain, [&](std::int64_t begin, std::int64_t end) {
    BITTERN_CALL(FinishTasks)(w, splits, begin, end);
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
