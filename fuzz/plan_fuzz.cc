// Makes from the bytes an op, a descriptor (one of its check cases with fields overwritten) and
// operands in heap blocks of the exact size, with mistakes planted in their views. What must hold:
//   nothing crashes, whatever the bytes;
//   when can_implement refuses, run refuses with the same code and writes nothing;
//   when it accepts, run succeeds and writes what ref writes, bit for bit.
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "oracle/oracle_impl.h"

namespace bittern {
namespace {

constexpr std::int64_t kMaxElements = 4096;  // larger problems are selected, but not run

class Bytes {
 public:
  Bytes(const std::uint8_t* data, std::size_t size) : at_(data), end_(data + size) {}
  bool empty() const { return at_ == end_; }
  std::uint8_t next() { return empty() ? std::uint8_t{0} : *at_++; }
  // Uniform in [0, n), n <= 256.
  std::size_t below(std::size_t n) { return next() % n; }
  // Small sizes mostly, sometimes one at the edge of its type.
  std::int64_t integer() {
    static constexpr std::int64_t kEdges[] = {-1,        1 << 16,   1 << 30,
                                              INT32_MAX, INT32_MIN, std::int64_t{1} << 32,
                                              INT64_MAX, INT64_MIN, std::int64_t{1} << 59,
                                              1000,      1024,      1025};
    const std::uint8_t b = next();
    return b < 240 ? b : kEdges[below(std::size(kEdges))];
  }

 private:
  const std::uint8_t* at_;
  const std::uint8_t* end_;
};

template <class Op>
[[noreturn]] void fail(const typename Op::Desc& desc, std::string_view what) {
  const std::string name(Op::kName), text(what);
  std::fprintf(stderr, "%s: %s   %s\n", name.c_str(), text.c_str(), flags_text<Op>(desc).c_str());
  std::abort();
}

template <class Op>
typename Op::Desc make_desc(Bytes& bytes) {
  static const auto* const cases = new std::vector<typename Op::Desc>(oracle::Cases<Op>::check());
  typename Op::Desc desc = (*cases)[(bytes.next() * 256u + bytes.next()) % cases->size()];
  const std::uint8_t overwrite = bytes.next();
  int field = 0;
  Op::fields(desc, [&](const char* name, auto& member, const char*) {
    if ((overwrite >> (field++ % 8) & 1) == 0) return;
    const auto names = field_names<std::remove_cvref_t<decltype(member)>>();
    (void)assign_field(
        name, member,
        names.empty() ? bytes.integer() : static_cast<std::int64_t>(bytes.below(names.size())));
  });
  return desc;
}

// An operand's memory: exactly as long as its view spans, so that the address sanitizer sees a read
// one byte too far.
struct Block {
  std::unique_ptr<std::byte[]> data;
  std::size_t size = 0;
  std::vector<std::byte> contents() const { return {data.get(), data.get() + size}; }
};

template <class Op>
std::vector<Block> move_to_blocks(oracle::Problem<Op>& p, std::size_t lead) {
  std::vector<Block> blocks;
  for (oracle::Store& s : p.stores) {
    Block& block = blocks.emplace_back();
    const std::byte* first = s.bytes.data() + s.offset;
    const std::size_t size = s.bytes.size() - s.offset - oracle::kCanary;
    const std::size_t skip = lead * size_of(s.expected.dtype);
    block.size = skip + size;
    block.data = std::make_unique<std::byte[]>(block.size);
    if (size != 0) std::memcpy(block.data.get() + skip, first, size);
    Op::operands(p.desc, p.args, [&](const char*, auto& v, const Operand&) {
      if (v.data == first) v.data = block.data.get() + skip;
    });
  }
  return blocks;
}

// One thing wrong, or merely unusual, with one view.
template <class V>
void plant(Bytes& bytes, V& v, const std::vector<Block>& blocks) {
  const int axis = static_cast<int>(bytes.below(kMaxRank));
  switch (bytes.below(9)) {
    case 0: v.data = nullptr; break;
    case 1: v.dtype = static_cast<DType>(bytes.below(kDTypeCount)); break;
    case 2: v.shape[axis] = bytes.integer(); break;
    case 3: v.stride[axis] = bytes.integer(); break;
    case 4: v.shape.rank = axis; break;
    case 5: v.stride.rank = axis; break;
    case 6: v.device = {Device::Type::cuda, axis}; break;
    case 7: v.data = blocks[bytes.below(blocks.size())].data.get(); break;
    default:
      if (v.data != nullptr) {
        const Block& block = blocks[bytes.below(blocks.size())];
        if (block.size != 0) v.data = block.data.get() + bytes.next() % block.size;
      }
  }
}

// Whether every view lies inside one of the blocks; a planted stride or address may leave them,
// which can_implement has no means to know.
template <class Op>
bool inside(const typename Op::Desc& desc, const typename Op::Args& args,
            const std::vector<Block>& blocks) {
  bool all = true;
  Op::operands(desc, args, [&](const char*, const auto& v, const Operand& expected) {
    const std::int64_t numel = expected.shape.numel();
    if (v.data == nullptr || numel == 0) return;
    std::int64_t span = 1;
    for (int i = 0; i < v.shape.rank && i < v.stride.rank; ++i) {
      if (v.shape[i] <= 1) continue;
      if (v.stride[i] < 0 || v.stride[i] > (1 << 20) || v.shape[i] > (1 << 20)) {
        all = false;
        return;
      }
      span += (v.shape[i] - 1) * v.stride[i];
    }
    const auto size = static_cast<std::size_t>(span) * size_of(v.dtype);
    const auto* begin = static_cast<const std::byte*>(v.data);
    all = all && std::any_of(blocks.begin(), blocks.end(), [&](const Block& b) {
            return begin >= b.data.get() && begin + size <= b.data.get() + b.size;
          });
  });
  return all;
}

template <class Op>
void make_nans_equal(const typename Op::Desc& desc, const typename Op::Args& args) {
  Op::operands(desc, args, [&](const char*, const auto& v, const Operand& expected) {
    if constexpr (std::is_same_v<std::remove_cvref_t<decltype(v)>, MutView>) {
      if (v.data == nullptr || !is_float(expected.dtype)) return;
      const std::int64_t numel = expected.shape.numel();
      for (std::int64_t i = 0; i < numel; ++i) {
        if (std::isnan(oracle::get(as_const(v), i))) oracle::put(as_const(v), i, NAN);
      }
    }
  });
}

template <class Op>
void fuzz_op(Bytes& bytes) {
  const typename Op::Desc desc = make_desc<Op>(bytes);
  const auto isas = cpu::available_isas();
  if (!isas.empty()) cpu::force_isa(isas[bytes.below(isas.size())]);
  set_num_threads(static_cast<int>(1 + bytes.below(3)));
  const auto plan = Plan<Op>::select(desc);
  if (!plan) return;
  const auto ref = Plan<Op>::select(desc, {}, Preference::exact, "ref");
  if (!ref) fail<Op>(desc, "ref refuses what another kernel takes");
  (void)plan->sku();
  (void)plan->workspace_bytes();

  bool small = true;
  typename Op::Args none;
  Op::operands(desc, none, [&](const char*, const auto&, const Operand& expected) {
    small = small && expected.shape.numel() <= kMaxElements;
  });
  if (!small) {
    (void)plan->can_implement(none);
    return;
  }

  const std::uint8_t look = bytes.next();
  const oracle::Layout layout{.padded_rows = (look & 1) != 0,
                              .left_out = look >> 1 & 7,
                              .in_place = static_cast<int>(look >> 4 & 3) - 1,
                              .axis_order = static_cast<int>(bytes.below(8))};
  auto problem = oracle::make_problem<Op>(desc, bytes.next(), layout);
  const std::vector<Block> blocks = move_to_blocks(problem, look >> 6);
  typename Op::Args& args = problem.args;
  const std::size_t mistakes = bytes.below(4);
  for (std::size_t i = 0; i < mistakes; ++i) {
    std::size_t operand = bytes.below(blocks.size());
    Op::operands(desc, args, [&](const char*, auto& v, const Operand&) {
      if (operand-- == 0) plant(bytes, v, blocks);
    });
  }

  std::vector<std::vector<std::byte>> before;
  for (const Block& b : blocks) before.push_back(b.contents());
  const auto run = [&](const Plan<Op>& p) {
    const std::size_t size = p.workspace_bytes();
    const std::unique_ptr<void, decltype(&std::free)> scratch(
        std::aligned_alloc(64, (size + 63) / 64 * 64), std::free);
    return p.run(args, {}, {scratch.get(), size});
  };

  // can_implement reads the contents of some operands.
  if (requires { Op::check_contents(desc, args); } && !inside<Op>(desc, args, blocks)) return;
  const Status allowed = plan->can_implement(args);
  if (!allowed.ok()) {
    if (run(*plan).code() != allowed.code()) fail<Op>(desc, "run and can_implement disagree");
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      if (blocks[i].contents() != before[i]) fail<Op>(desc, "a refused run wrote something");
    }
    return;
  }
  if (!inside<Op>(desc, args, blocks)) return;
  if (plan->workspace_bytes() != 0 && plan->run(args).code() != Code::invalid_argument) {
    fail<Op>(desc, "ran without its workspace");
  }
  const Status told = run(*plan);
  if (!oracle::has_outputs<Op>(told)) fail<Op>(desc, told.message());
  make_nans_equal<Op>(desc, args);
  std::vector<std::vector<std::byte>> got;
  for (const Block& b : blocks) got.push_back(b.contents());
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    if (blocks[i].size != 0) std::memcpy(blocks[i].data.get(), before[i].data(), blocks[i].size);
  }
  const Status ref_told = run(*ref);
  if (!oracle::has_outputs<Op>(ref_told)) fail<Op>(desc, ref_told.message());
  if (told.ok() != ref_told.ok()) fail<Op>(desc, "an error that ref does not have, or the reverse");
  make_nans_equal<Op>(desc, args);
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    if (blocks[i].contents() != got[i]) {
      fail<Op>(desc, std::string(plan->sku().architecture) + " differs from ref in " +
                         problem.stores[i].name);
    }
  }
}

}  // namespace
}  // namespace bittern

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using bittern::Bytes;
  static constexpr void (*kOps[])(Bytes&) = {
#define BITTERN_OP(T, f, CPU, CUDA) bittern::fuzz_op<bittern::T>,
#include "ops/ops.inc"
  };
  bittern::cpu::ignore_grain(true);
  Bytes bytes(data, size);
  kOps[bytes.below(std::size(kOps))](bytes);
  return 0;
}
