#include "oracle/oracle_impl.h"

namespace bittern::oracle {

double Rng::awkward() {
  static constexpr double kValues[] = {0.0,       -0.0,    0.5,   -0.5,   1.5,    2.5,
                                       -1.5,      1.0,     1e30,  -1e30,  1e-30,  0x1p-149,
                                       -0x1p-149, 0x1p-24, 65504, -65504, 3.0e38, -3.0e38};
  switch (below(16)) {
    case 0: return kValues[below(std::size(kValues))];
    case 1: {
      constexpr double kInf = std::numeric_limits<double>::infinity();
      constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
      const std::int64_t which = below(12);
      return which == 0   ? kNan
             : which == 1 ? kInf
             : which == 2 ? -kInf
             : which == 3 ? std::copysign(kNan, -1.0)
                          : normal() * std::ldexp(1.0, static_cast<int>(below(40)) - 20);
    }
    default: return normal();
  }
}

namespace {

std::int64_t position(const Shape& shape, const Shape& stride, std::int64_t index) {
  std::int64_t at = 0;
  for (int i = shape.rank; i-- > 0; index /= shape[i]) at += index % shape[i] * stride[i];
  return at;
}
std::int64_t position(const ConstView& v, std::int64_t index) {
  return position(v.shape, v.stride, index);
}

template <class F>
Status visit_all(DType dtype, F&& f) {
  return visit<float, double, f16, bf16, std::uint8_t, std::int8_t, std::int32_t, std::uint32_t>(
      dtype, static_cast<F&&>(f));
}

template <class T>
double as_double(T x) {
  return static_cast<double>(to_math(x));
}
template <>
double as_double(std::int32_t x) {
  return x;
}
template <>
double as_double(std::uint32_t x) {
  return x;
}

}  // namespace

void put(const ConstView& v, std::int64_t index, double value) {
  (void)visit_all(v.dtype, [&]<class T>(Type<T>) {
    T& at = data<T>(v)[position(v, index)];
    if constexpr (std::is_integral_v<T>) {
      at = static_cast<T>(static_cast<std::int64_t>(value));
    } else {
      at = from_math<T>(static_cast<Math<T>>(value));
    }
    return Status();
  });
}

double get(const ConstView& v, std::int64_t index) {
  double value = 0;
  (void)visit_all(v.dtype, [&]<class T>(Type<T>) {
    value = as_double(v.as<T>()[position(v, index)]);
    return Status();
  });
  return value;
}

double step(DType dtype, double value, int steps) {
  if (!std::isfinite(value)) return value;
  (void)visit_float(dtype, [&]<class T>(Type<T>) {
    using Bits =
        std::conditional_t<sizeof(T) == 2, std::uint16_t,
                           std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>>;
    constexpr int kTop = 8 * sizeof(T) - 1;
    const auto bits = std::bit_cast<Bits>(from_math<T>(static_cast<Math<T>>(value)));
    // Sign and magnitude to a line of integers and back.
    auto line = static_cast<std::int64_t>(bits & static_cast<Bits>(~(Bits{1} << kTop)));
    if ((bits >> kTop & 1) != 0) line = -line;
    line += steps;
    const auto magnitude = static_cast<Bits>(line < 0 ? -line : line);
    value = as_double(
        std::bit_cast<T>(static_cast<Bits>(line < 0 ? magnitude | Bits{1} << kTop : magnitude)));
    return Status();
  });
  return value;
}

Rng numbers_of(std::string_view operand, std::uint64_t seed) {
  std::uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (const char c : operand) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return Rng(hash + seed);
}

void fill(const ConstView& v, Rng& rng) {
  const std::int64_t n = v.shape.numel();
  for (std::int64_t i = 0; i < n; ++i) {
    switch (v.dtype) {
      case DType::s32: {
        // Zero points: small ones, and those where f32 loses the last bit or int32 would overflow.
        static constexpr double kFar[] = {16777215, 16777216,   16777217,      -16777217,  4194304,
                                          -4194305, 2147483647, -2147483648.0, 2147483520, 1 << 30};
        put(v, i,
            rng.chance(12) ? kFar[rng.below(std::size(kFar))]
                           : static_cast<double>(rng.below(41) - 20));
        break;
      }
      case DType::u8:
      case DType::s8:
      case DType::u32: put(v, i, static_cast<double>(rng.next() & 0xffffffffu)); break;
      default: put(v, i, rng.awkward());
    }
  }
}

void canonicalise_nans(Store& store) {
  const std::int64_t numel = store.expected.shape.numel();
  (void)visit_float(store.expected.dtype, [&]<class T>(Type<T>) {
    for (std::int64_t i = 0; i < numel; ++i) {
      std::byte* at = store.bytes.data() + store.offset +
                      static_cast<std::size_t>(position(store.shape, store.stride, i)) * sizeof(T);
      T x;
      std::memcpy(&x, at, sizeof(T));
      if (std::isnan(to_math(x))) {
        x = from_math<T>(std::numeric_limits<Math<T>>::quiet_NaN());
        std::memcpy(at, &x, sizeof(T));
      }
    }
    return Status();
  });
}

std::string difference(const Store& got, const Store& want) {
  if (got.bytes == want.bytes) return {};
  const Shape& shape = got.expected.shape;
  const std::int64_t numel = shape.numel(), rows = shape.rank > 0 ? shape[0] : 1;
  const std::int64_t row = rows > 0 && numel > 0 ? numel / rows : 1;
  if (!got.output) return got.name + ": an input was changed";
  const auto view_of = [&](const Store& s) {
    return ConstView{s.bytes.data() + s.offset, s.expected.dtype, {}, s.shape, s.stride};
  };
  const ConstView g = view_of(got), w = view_of(want);
  const std::size_t size = size_of(got.expected.dtype);
  for (std::int64_t i = 0; i < numel; ++i) {
    const auto at = static_cast<std::size_t>(position(got.shape, got.stride, i)) * size;
    if (std::memcmp(got.bytes.data() + got.offset + at, want.bytes.data() + want.offset + at,
                    size) != 0) {
      char text[96];
      std::snprintf(text, sizeof text, "[%lld,%lld]: %.9g, expected %.9g",
                    static_cast<long long>(i / row), static_cast<long long>(i % row), get(g, i),
                    get(w, i));
      return got.name + text;
    }
  }
  return got.name + ": memory outside the tensor was written";
}

void copy_elements(const Store& from, Store& to) {
  const std::size_t size = size_of(from.expected.dtype);
  for (std::int64_t i = 0; i < from.expected.shape.numel(); ++i) {
    const auto at = static_cast<std::size_t>(position(from.shape, from.stride, i)) * size;
    std::memcpy(to.bytes.data() + to.offset + at, from.bytes.data() + from.offset + at, size);
  }
}

void poison_elements(std::vector<Store>& stores, const std::vector<Store>& ref) {
  for (std::size_t n = 0; n < stores.size(); ++n) {
    Store& s = stores[n];
    if (!s.present || !s.output || (s.expected.flags & Operand::kInOut) != 0) continue;
    const std::size_t size = size_of(s.expected.dtype);
    for (std::int64_t i = 0; i < s.expected.shape.numel(); ++i) {
      const auto at = static_cast<std::size_t>(position(s.shape, s.stride, i)) * size;
      const auto* written = ref[n].bytes.data() + ref[n].offset + at;
      if (!std::all_of(written, written + size, [](std::byte b) { return b == kPoison; }))
        std::fill_n(s.bytes.data() + s.offset + at, size, kOtherPoison);
    }
  }
}

std::string compare_runs(const std::vector<Store>& got, const std::vector<Store>& want) {
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (!got[i].present || !got[i].output) continue;
    Store g = got[i], w = want[i];
    canonicalise_nans(g);
    canonicalise_nans(w);
    if (std::string text = difference(g, w); !text.empty()) return text;
  }
  return {};
}

namespace {

// The distance to the next larger magnitude; of the largest, to the power of two beyond it.
double ulp(DType dtype, double x) {
  double size = 0;
  (void)visit_float(dtype, [&]<class T>(Type<T>) {
    size = std::min(std::fabs(x), static_cast<double>(max_finite<T>()));
    return Status();
  });
  return size > 0 ? size - step(dtype, size, -1) : step(dtype, 0, 1);
}

// An infinity as the first value that rounds to it, so that overflow is an error like any other.
double bounded_value(DType dtype, double x) {
  if (!std::isinf(x)) return x;
  (void)visit_float(dtype, [&]<class T>(Type<T>) {
    const auto most = static_cast<double>(max_finite<T>());
    x = std::copysign(most + ulp(dtype, most), x);
    return Status();
  });
  return x;
}

std::string number(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", x);
  return text;
}

}  // namespace

void Judge::fail(std::string_view operand, std::int64_t index, const std::string& what) {
  if (failure_.empty())
    failure_ = std::string(operand).append("[") + std::to_string(index) + "]: " + what;
}

void Judge::value(std::string_view operand, const ConstView& got, const ConstView& want,
                  std::int64_t index, double unit) {
  const double g = get(got, index), w = get(want, index);
  if (std::isinf(unit)) return;
  if (std::isnan(g) || std::isnan(w) || std::isnan(unit)) {
    const bool same = std::isnan(g) == std::isnan(w) && (!std::isinf(w) || g == w);
    if (!same) fail(operand, index, number(g) + ", expected " + number(w));
    return;
  }
  const double a = bounded_value(got.dtype, g), b = bounded_value(got.dtype, w);
  // f32: what is subnormal has no relative error.
  const double slack =
      got.dtype == DType::f32 ? 0x1p-149 : ulp(got.dtype, std::max(std::fabs(a), std::fabs(b)));
  distance(operand, index, g, w, std::fabs(a - b), unit, slack);
}

void Judge::distance(std::string_view operand, std::int64_t index, double got, double want,
                     double error, double unit, double slack) {
  if (std::isinf(unit)) return;
  const double most = bound_ * unit + slack;
  if (error > 0) worst_ = std::max(worst_, error / most);
  if (error <= most) return;
  fail(operand, index,
       number(got) + ", expected " + number(want) + " within " + number(most) + " (bound " +
           number(bound_) + " x terms " + number(unit) +
           (slack > 0 ? " + " + number(slack) : std::string()) + "), off by " + number(error) +
           ", " + number(error / most) + " times as much");
}

void lay_out(const Operand& expected, const Layout& layout, std::size_t which, Store& s) {
  const bool any = layout.axis_order != 0 && (expected.flags & Operand::kStrided) != 0;
  s.shape = expected.shape;
  s.stride = s.shape.dense_strides();
  const std::int64_t numel = s.shape.numel();
  if (s.shape.rank < 2 || numel == 0) return;
  const std::int64_t row = numel / s.shape[0];
  // Odd, so that rows start at every alignment; the same for in-place partners of one dtype.
  const std::int64_t pad = layout.padded_rows ? 3 + 2 * (row % 3) : 0;
  if (!any) {
    if ((expected.flags & (Operand::kRowStride | Operand::kStrided)) != 0) s.stride[0] = row + pad;
    return;
  }
  Rng rng(static_cast<std::uint64_t>(layout.axis_order) * 31 + which);
  if ((expected.flags & Operand::kRowAxes) != 0 && s.shape.rank < kMaxRank) {
    for (const std::int64_t factor : {5, 3, 2}) {  // rows as two axes
      if (s.shape[0] % factor != 0) continue;
      Shape split{s.shape[0] / factor, factor};
      for (int i = 1; i < s.shape.rank; ++i) split[split.rank++] = s.shape[i];
      s.shape = split;
      break;
    }
  }
  // The axes in any order, the last innermost unless it may lie anywhere; room after each.
  const bool scattered =
      (expected.flags & Operand::kScattered) == static_cast<unsigned>(Operand::kScattered);
  std::vector<int> axes;
  for (int i = 0; i < s.shape.rank; ++i) axes.push_back(i);
  const int mixed = s.shape.rank - (scattered ? 0 : 1);
  for (int i = 0; i + 1 < mixed; ++i)
    std::swap(axes[static_cast<std::size_t>(i)],
              axes[static_cast<std::size_t>(i + rng.below(mixed - i))]);
  s.stride = s.shape;
  std::int64_t step = 1;
  for (auto axis = axes.rbegin(); axis != axes.rend(); ++axis) {
    s.stride[*axis] = step;
    step = step * s.shape[*axis] + (layout.padded_rows ? rng.below(4) : 0);
  }
  // A batch that shares its values.
  if (!s.output && s.shape.rank > 2 && rng.chance(4)) s.stride[axes.front()] = 0;
}

std::vector<Layout> layouts(int optional_operands, int in_place_pairs, bool strided,
                            std::uint64_t seed) {
  std::vector<Layout> out;
  Rng rng(seed + 77);
  out.push_back({});
  out.push_back({.padded_rows = true, .unaligned = true});
  if (strided) {
    out.push_back({.axis_order = static_cast<int>(1 + rng.below(1000))});
    out.push_back({.padded_rows = true,
                   .unaligned = true,
                   .axis_order = static_cast<int>(1 + rng.below(1000))});
  }
  const auto leave_out = [&](int mask) {
    out.push_back({.padded_rows = rng.chance(2), .unaligned = rng.chance(2), .left_out = mask});
  };
  const int all = (1 << optional_operands) - 1;
  if (optional_operands <= 4) {
    for (int mask = 1; mask <= all; ++mask) leave_out(mask);
  } else {  // all, and a few alone or together: others in the next case, whose seed differs
    leave_out(all);
    for (int i = 0; i < 3; ++i) leave_out(1 << rng.below(optional_operands));
    for (int i = 0; i < 2; ++i) leave_out(static_cast<int>(1 + rng.below(all)));
  }
  for (int pair = 0; pair < in_place_pairs; ++pair)
    out.push_back({.padded_rows = rng.chance(2), .unaligned = rng.chance(2), .in_place = pair});
  return out;
}

namespace {

template <class Op>
void check_cases(const Settings& settings, Report& report) {
  auto cases = Cases<Op>::check();
  const bool on_cuda = settings.cuda && cuda_plugin(settings.cuda_index).ok();
  for (const auto& desc : Cases<Op>::bounded(on_cuda)) cases.push_back(desc);
  Settings each = settings;
  for (std::size_t i = 0; i < cases.size(); i += std::max<std::size_t>(settings.every, 1)) {
    if (report.failures.size() >= settings.max_failures) return;
    if (settings.progress) settings.progress(i, cases.size());
    each.seed = settings.seed + i;
    report.add(parity<Op>(cases[i], each));
  }
}

}  // namespace

Report check_op(std::string_view op, const Settings& settings) {
  Report report;
#define BITTERN_OP(T, f, CPU, CUDA) \
  if (op.empty() || op == T::kName) check_cases<T>(settings, report);
#include "ops/ops.inc"
  return report;
}

namespace {

template <class Op>
Result<Report> check_fields(const std::vector<std::pair<std::string, std::string>>& fields,
                            const Settings& settings) {
  typename Op::Desc desc;
  for (const auto& [field, text] : fields) {
    if (Status s = set_field<Op>(desc, field, std::string_view(text)); !s.ok()) return s;
  }
  if (Status s = Op::check(desc); !s.ok()) return s;
  return parity<Op>(desc, settings);
}

}  // namespace

Result<Report> check_flags(std::string_view op,
                           const std::vector<std::pair<std::string, std::string>>& fields,
                           const Settings& settings) {
#define BITTERN_OP(T, f, CPU, CUDA) \
  if (op == T::kName) return check_fields<T>(fields, settings);
#include "ops/ops.inc"
  return invalid(std::string("no op called ").append(op));
}

#define BITTERN_OP(T, f, CPU, CUDA)                                                        \
  template Problem<T> make_problem<T>(const T::Desc&, std::uint64_t, const Layout&, bool); \
  template Report parity<T>(const T::Desc&, const Settings&, const Kernel<T>*);
#include "ops/ops.inc"

}  // namespace bittern::oracle
