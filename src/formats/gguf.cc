#include "formats/gguf.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cinttypes>
#include <compare>
#include <cstdio>
#include <cstring>
#include <limits>
#include <new>
#include <numeric>
#include <utility>

namespace bittern {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr std::uint64_t kLeastKeyBytes = 8 + 1 + 4 + 1;         // a key of one letter, a u8
constexpr std::uint64_t kLeastTensorBytes = 8 + 1 + 4 + 4 + 8;  // a name of one letter, rank 0
constexpr std::uint64_t kArrayHeader = 4 + 8;
constexpr std::uint64_t kMostBytes = (std::uint64_t{1} << 62) - 1;  // of tensors written
constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();

template <class T>
T load(std::span<const std::byte> bytes, std::size_t at = 0) {
  T x;
  std::memcpy(&x, bytes.data() + at, sizeof x);
  return x;
}

std::string_view text(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::string dec(std::uint64_t x) { return std::to_string(x); }

// A name from a file, fit for one line of an error.
std::string shown(std::string_view name) {
  constexpr std::size_t kMostShown = 80;
  std::string out;
  for (const char c : name.substr(0, kMostShown)) {
    if (c >= ' ' && c <= '~' && c != '\\') {
      out += c;
    } else {
      char escape[5];
      std::snprintf(escape, sizeof escape, "\\x%02x", static_cast<unsigned char>(c));
      out += escape;
    }
  }
  return name.size() > kMostShown ? out + "..." : out;
}
std::string of_key(std::string_view key) { return "key " + shown(key) + ": "; }
std::string of_tensor(std::string_view name) { return "tensor " + shown(name) + ": "; }

std::uint64_t aligned_to(std::uint64_t n, std::uint64_t alignment) {
  return (n + alignment - 1) & ~(alignment - 1);
}

// Calls f with the scalar of this type; false for strings and arrays.
template <class F>
bool with_scalar(GgufType type, std::span<const std::byte> bytes, F&& f) {
  switch (type) {
    case GgufType::u8: return f(load<std::uint8_t>(bytes)), true;
    case GgufType::s8: return f(load<std::int8_t>(bytes)), true;
    case GgufType::u16: return f(load<std::uint16_t>(bytes)), true;
    case GgufType::s16: return f(load<std::int16_t>(bytes)), true;
    case GgufType::u32: return f(load<std::uint32_t>(bytes)), true;
    case GgufType::s32: return f(load<std::int32_t>(bytes)), true;
    case GgufType::u64: return f(load<std::uint64_t>(bytes)), true;
    case GgufType::s64: return f(load<std::int64_t>(bytes)), true;
    case GgufType::f32: return f(load<float>(bytes)), true;
    case GgufType::f64: return f(load<double>(bytes)), true;
    case GgufType::boolean: return f(load<std::uint8_t>(bytes) != 0), true;
    case GgufType::string:
    case GgufType::array: break;
  }
  return false;
}

bool is_float(GgufType type) { return type == GgufType::f32 || type == GgufType::f64; }
bool is_integer(GgufType type) {
  return size_of_gguf(type) > 0 && !is_float(type) && type != GgufType::boolean;
}
bool is_number(GgufType type) { return is_integer(type) || is_float(type); }

// "s32 -3", "array of string": what a getter found instead.
std::string found(const GgufValue& value) {
  std::string type = name(value.type());
  if (value.type() == GgufType::array) return type + " of " + name(value.element());
  if (const auto x = value.as_uint()) return type + " " + std::to_string(*x);
  if (const auto x = value.as_integer()) return type + " " + std::to_string(*x);
  if (const auto x = value.as_bool()) return type + (*x ? " true" : " false");
  return type;
}

// The size of a checked value that starts `bytes`.
std::size_t encoded_size(GgufType type, std::span<const std::byte> bytes) {
  if (const std::uint64_t size = size_of_gguf(type)) return size;
  if (type == GgufType::string) return 8 + load<std::uint64_t>(bytes);
  const auto element = static_cast<GgufType>(load<std::uint32_t>(bytes));
  const auto count = load<std::uint64_t>(bytes, 4);
  if (const std::uint64_t size = size_of_gguf(element)) return kArrayHeader + count * size;
  std::size_t at = kArrayHeader;
  for (std::uint64_t i = 0; i < count; ++i) at += encoded_size(element, bytes.subspan(at));
  return at;
}

int depth_of(const GgufValue& value) {
  if (value.type() != GgufType::array) return 0;
  int depth = 0;
  if (value.element() == GgufType::array)
    value.each([&](const GgufValue& inner) { depth = std::max(depth, depth_of(inner)); });
  return depth + 1;
}

template <class T, class Name>
std::vector<std::uint32_t> sorted_by(const std::vector<T>& items, Name&& name) {
  std::vector<std::uint32_t> order(items.size());
  std::iota(order.begin(), order.end(), 0u);
  // Equal ones stay in the file's order, so that an error names the later.
  std::sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
    const auto by_name = name(items[a]) <=> name(items[b]);
    return std::is_eq(by_name) ? a < b : std::is_lt(by_name);
  });
  return order;
}

// The item of this name, given the order of names.
template <class T, class Name>
const T* look_up(const std::vector<T>& items, const std::vector<std::uint32_t>& order,
                 std::string_view wanted, Name&& name) {
  const auto at =
      std::lower_bound(order.begin(), order.end(), wanted,
                       [&](std::uint32_t i, std::string_view x) { return name(items[i]) < x; });
  return at != order.end() && name(items[*at]) == wanted ? &items[*at] : nullptr;
}

std::string_view key_of(const GgufKey& k) { return k.key; }
std::string_view name_of(const GgufTensor& t) { return t.name; }

// ---- names of the parts of a split file: prefix-00001-of-00003.gguf ----

constexpr std::size_t kPartSuffix = 20;

std::string part_suffix(std::uint64_t part, std::uint64_t count) {
  char suffix[64];
  std::snprintf(suffix, sizeof suffix, "-%05" PRIu64 "-of-%05" PRIu64 ".gguf", part + 1, count);
  return suffix;
}

// "part 1 of 3"
std::string part_name(std::uint64_t part, std::uint64_t count) {
  return "part " + dec(part + 1) + " of " + dec(count);
}

}  // namespace

// ---- types ----

namespace {
constexpr GgmlTypeInfo kTypes[] = {
    {GgmlType::f32, "F32", 1, 4, true},
    {GgmlType::f16, "F16", 1, 2, true},
    {GgmlType::q4_0, "Q4_0", 32, 18, true},
    {GgmlType::q4_1, "Q4_1", 32, 20, true},
    {GgmlType::q5_0, "Q5_0", 32, 22, true},
    {GgmlType::q5_1, "Q5_1", 32, 24, true},
    {GgmlType::q8_0, "Q8_0", 32, 34, true},
    {GgmlType::q8_1, "Q8_1", 32, 36, false},  // two halves; the gguf package still says two floats
    {GgmlType::q2_k, "Q2_K", 256, 84, true},
    {GgmlType::q3_k, "Q3_K", 256, 110, true},
    {GgmlType::q4_k, "Q4_K", 256, 144, true},
    {GgmlType::q5_k, "Q5_K", 256, 176, true},
    {GgmlType::q6_k, "Q6_K", 256, 210, true},
    {GgmlType::q8_k, "Q8_K", 256, 292, false},
    {GgmlType::iq2_xxs, "IQ2_XXS", 256, 66, false},
    {GgmlType::iq2_xs, "IQ2_XS", 256, 74, false},
    {GgmlType::iq3_xxs, "IQ3_XXS", 256, 98, false},
    {GgmlType::iq1_s, "IQ1_S", 256, 50, false},
    {GgmlType::iq4_nl, "IQ4_NL", 32, 18, true},
    {GgmlType::iq3_s, "IQ3_S", 256, 110, false},
    {GgmlType::iq2_s, "IQ2_S", 256, 82, false},
    {GgmlType::iq4_xs, "IQ4_XS", 256, 136, true},
    {GgmlType::i8, "I8", 1, 1, false},
    {GgmlType::i16, "I16", 1, 2, false},
    {GgmlType::i32, "I32", 1, 4, false},
    {GgmlType::i64, "I64", 1, 8, false},
    {GgmlType::f64, "F64", 1, 8, false},
    {GgmlType::iq1_m, "IQ1_M", 256, 56, false},
    {GgmlType::bf16, "BF16", 1, 2, true},
    {GgmlType::tq1_0, "TQ1_0", 256, 54, false},
    {GgmlType::tq2_0, "TQ2_0", 256, 66, false},
    {GgmlType::mxfp4, "MXFP4", 32, 17, true},
    {GgmlType::nvfp4, "NVFP4", 64, 36, false},
    {GgmlType::q1_0, "Q1_0", 128, 18, false},
};
}  // namespace

std::span<const GgmlTypeInfo> ggml_types() { return kTypes; }

const GgmlTypeInfo* ggml_type(std::uint32_t id) {
  for (const GgmlTypeInfo& t : kTypes) {
    if (static_cast<std::uint32_t>(t.type) == id) return &t;
  }
  return nullptr;
}

const GgmlTypeInfo* ggml_type(std::string_view any_case) {
  const auto upper = [](char c) { return c >= 'a' && c <= 'z' ? static_cast<char>(c - 32) : c; };
  for (const GgmlTypeInfo& t : kTypes) {
    const std::string_view name = t.name;
    if (std::equal(name.begin(), name.end(), any_case.begin(), any_case.end(),
                   [&](char a, char b) { return a == upper(b); }))
      return &t;
  }
  return nullptr;
}

Result<std::uint64_t> ggml_bytes(GgmlType type, const Shape& shape) {
  if (shape.rank > kGgufMostRank) {
    return invalid("rank " + std::to_string(shape.rank) + ", expected at most " +
                   std::to_string(kGgufMostRank));
  }
  const GgmlTypeInfo* known = ggml_type(static_cast<std::uint32_t>(type));
  if (known == nullptr) {
    return invalid("type " + dec(static_cast<std::uint32_t>(type)) +
                   ", expected one that ggml has");
  }
  const GgmlTypeInfo& t = *known;
  const std::int64_t row = shape.rank > 0 ? shape[shape.rank - 1] : 1;
  if (row % t.block != 0) {
    return invalid("row of " + std::to_string(row) + " elements of " + t.name +
                   ", expected a multiple of " + std::to_string(t.block));
  }
  // A zero must not hide a product of the others that overflows: code multiplies some of them.
  bool empty = false, fits = true;
  std::int64_t elements = 1, bytes = t.block_bytes;
  for (int i = 0; i < shape.rank; ++i) {
    if (shape[i] < 0)
      return invalid("dimension " + std::to_string(shape[i]) + ", expected at least 0");
    empty |= shape[i] == 0;
    const bool is_row = i == shape.rank - 1;
    const std::int64_t n = std::max<std::int64_t>(shape[i], 1);
    const std::int64_t blocks = is_row ? std::max<std::int64_t>(n / t.block, 1) : n;
    fits &= !__builtin_mul_overflow(elements, n, &elements);
    fits &= !__builtin_mul_overflow(bytes, blocks, &bytes);
  }
  if (!fits) return invalid("shape " + shape.str() + ", expected fewer than 2^63 bytes");
  return empty ? 0 : static_cast<std::uint64_t>(bytes);
}

const char* name(GgufType type) {
  static constexpr const char* kNames[kGgufTypeCount] = {
      "u8", "s8", "u16", "s16", "u32", "s32", "f32", "bool", "string", "array", "u64", "s64", "f64",
  };
  return kNames[static_cast<std::uint32_t>(type)];
}

std::uint64_t size_of_gguf(GgufType type) {
  static constexpr std::uint64_t kSizes[kGgufTypeCount] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
  return kSizes[static_cast<std::uint32_t>(type)];
}

// ---- values ----

GgufValue GgufValue::make(GgufType type, std::span<const std::byte> encoded) {
  GgufValue value;
  value.type_ = type;
  value.encoded_ = encoded;
  if (type == GgufType::array) {
    value.element_ = static_cast<GgufType>(load<std::uint32_t>(encoded));
    value.count_ = load<std::uint64_t>(encoded, 4);
  }
  return value;
}

GgufValue GgufValue::next(std::size_t& from) const {
  const auto rest = encoded_.subspan(kArrayHeader + from);
  const std::size_t size = encoded_size(element_, rest);
  from += size;
  return make(element_, rest.first(size));
}

GgufValue GgufValue::at(std::uint64_t i) const {
  const std::uint64_t size = size_of_gguf(element_);
  return make(element_, encoded_.subspan(kArrayHeader + i * size, size));
}

std::optional<std::uint64_t> GgufValue::as_uint() const {
  std::optional<std::uint64_t> out;
  if (!is_integer(type_)) return out;
  with_scalar(type_, encoded_, [&](auto x) {
    if (x >= decltype(x){0}) out = static_cast<std::uint64_t>(x);
  });
  return out;
}

std::optional<std::int64_t> GgufValue::as_integer() const {
  std::optional<std::int64_t> out;
  if (!is_integer(type_)) return out;
  if (type_ == GgufType::u64 && load<std::uint64_t>(encoded_) > std::uint64_t{kMost}) return out;
  with_scalar(type_, encoded_, [&](auto x) { out = static_cast<std::int64_t>(x); });
  return out;
}

std::optional<double> GgufValue::as_number() const {
  std::optional<double> out;
  if (!is_number(type_)) return out;
  with_scalar(type_, encoded_, [&](auto x) { out = static_cast<double>(x); });
  return out;
}

std::optional<bool> GgufValue::as_bool() const {
  if (type_ != GgufType::boolean) return {};
  return load<std::uint8_t>(encoded_) != 0;
}

std::optional<std::string_view> GgufValue::as_string() const {
  if (type_ != GgufType::string) return {};
  return text(encoded_.subspan(8));
}

// ---- reading ----

// Walks one file from its start; nothing is taken from it before it is known to be there.
class GgufReader {
 public:
  // `head` is the file's, as far as it is known: all of it, or a copy of what lies before the data.
  GgufReader(GgufFile& to, const MappedFile& file, std::span<const std::byte> head)
      : to_(to), path_(file.path()), file_(file.bytes()), bytes_(head) {}
  std::uint64_t head_bytes() const { return at_; }

  Status read() {
    BITTERN_TRY(header());
    to_.keys_.reserve(key_count_);
    for (std::uint64_t i = 0; i < key_count_; ++i) BITTERN_TRY(key(i));
    BITTERN_TRY(index_keys());
    BITTERN_TRY(alignment());
    BITTERN_TRY(count("tensors", tensor_count_, kGgufMostTensors, kLeastTensorBytes));
    to_.tensors_.reserve(tensor_count_);
    places_.reserve(tensor_count_);
    for (std::uint64_t i = 0; i < tensor_count_; ++i) BITTERN_TRY(tensor(i));
    return place();
  }

 private:
  std::uint64_t left() const { return bytes_.size() - at_; }
  Status refuse(const std::string& what) const { return invalid(path_ + ": " + what); }

  // `where` is called only for an error.
  template <class Where>
  Status need(std::uint64_t n, Where&& where) const {
    if (n <= left()) return {};
    return refuse(where() + dec(n) + " bytes at byte " + dec(at_) + ", expected at most the " +
                  dec(left()) + " left in the file");
  }
  template <class T, class Where>
  Status take(T& x, Where&& where) {
    BITTERN_TRY(need(sizeof x, where));
    x = load<T>(bytes_, at_);
    at_ += sizeof x;
    return {};
  }
  template <class Where>
  Status take_string(std::string_view& x, Where&& where) {
    std::uint64_t size = 0;
    BITTERN_TRY(take(size, where));
    BITTERN_TRY(need(size, where));
    x = text(bytes_.subspan(at_, size));
    at_ += size;
    return {};
  }

  Status count(const char* what, std::uint64_t n, std::uint64_t most, std::uint64_t least_bytes) {
    most = std::min(most, left() / least_bytes);
    if (n <= most) return {};
    return refuse(dec(n) + " " + what + ", expected at most " + dec(most) + " in a file of " +
                  dec(bytes_.size()) + " bytes");
  }

  Status header() {
    const auto where = [] { return std::string("header: "); };
    const std::string_view magic = text(bytes_.first(std::min<std::size_t>(4, bytes_.size())));
    if (magic != "GGUF") return refuse("starts with '" + shown(magic) + "', expected 'GGUF'");
    at_ = 4;
    BITTERN_TRY(take(to_.version_, where));
    if (to_.version_ == 0x02000000 || to_.version_ == 0x03000000)
      return unsupported(path_ + ": big endian, expected little endian");
    if (to_.version_ != 2 && to_.version_ != 3)
      return unsupported(path_ + ": version " + dec(to_.version_) + ", expected 2 or 3");
    BITTERN_TRY(take(tensor_count_, where));
    BITTERN_TRY(take(key_count_, where));
    BITTERN_TRY(count("tensors", tensor_count_, kGgufMostTensors, kLeastTensorBytes));
    return count("keys", key_count_, kGgufMostKeys, kLeastKeyBytes);
  }

  Status key(std::uint64_t i) {
    const auto number_of = [&] { return "key " + dec(i + 1) + ": "; };
    std::string_view key;
    BITTERN_TRY(take_string(key, number_of));
    if (key.empty() || key.size() > kGgufMostKeyBytes) {
      return refuse(number_of() + "a name of " + dec(key.size()) + " bytes, expected 1.." +
                    dec(kGgufMostKeyBytes));
    }
    std::uint32_t type = 0;
    BITTERN_TRY(take(type, [&] { return of_key(key); }));
    BITTERN_TRY(known(key, type));
    const std::uint64_t start = at_;
    BITTERN_TRY(skip(key, static_cast<GgufType>(type), 0));
    const auto encoded = bytes_.subspan(start, at_ - start);
    to_.keys_.push_back({key, GgufValue::make(static_cast<GgufType>(type), encoded)});
    return {};
  }

  Status known(std::string_view key, std::uint32_t type) const {
    if (type < kGgufTypeCount) return {};
    return refuse(of_key(key) + "type " + dec(type) + ", expected 0.." + dec(kGgufTypeCount - 1));
  }

  // Checks a value and moves past it.
  Status skip(std::string_view key, GgufType type, int depth) {
    const auto where = [&] { return of_key(key); };
    if (type == GgufType::string) {
      std::string_view value;
      return take_string(value, where);
    }
    if (type != GgufType::array) return skip_scalars(key, type, 1);
    if (depth == kGgufMostDepth) {
      return refuse(where() + "arrays nested more than " + std::to_string(kGgufMostDepth) +
                    " deep, expected at most that");
    }
    std::uint32_t element_id = 0;
    std::uint64_t n = 0;
    BITTERN_TRY(take(element_id, where));
    BITTERN_TRY(known(key, element_id));
    BITTERN_TRY(take(n, where));
    const auto element = static_cast<GgufType>(element_id);
    const std::uint64_t size = size_of_gguf(element);
    const std::uint64_t least = size > 0 ? size : element == GgufType::string ? 8 : kArrayHeader;
    if (n > left() / least) {
      return refuse(where() + "array of " + dec(n) + " " + name(element) + ", expected at most " +
                    dec(left() / least) + " in the rest of the file");
    }
    if (size > 0) return skip_scalars(key, element, n);
    for (std::uint64_t i = 0; i < n; ++i) BITTERN_TRY(skip(key, element, depth + 1));
    return {};
  }

  Status skip_scalars(std::string_view key, GgufType type, std::uint64_t n) {
    const std::uint64_t size = n * size_of_gguf(type);
    BITTERN_TRY(need(size, [&] { return of_key(key); }));
    if (type == GgufType::boolean) {
      for (const std::byte b : bytes_.subspan(at_, size)) {
        if (b > std::byte{1}) {
          return refuse(of_key(key) + "bool of value " + dec(std::to_integer<unsigned>(b)) +
                        ", expected 0 or 1");
        }
      }
    }
    at_ += size;
    return {};
  }

  Status index_keys() {
    auto& order = to_.keys_by_name_;
    order = sorted_by(to_.keys_, key_of);
    for (std::size_t i = 1; i < order.size(); ++i) {
      if (to_.keys_[order[i - 1]].key == to_.keys_[order[i]].key)
        return refuse(of_key(to_.keys_[order[i]].key) + "given twice, expected once");
    }
    return {};
  }

  Status alignment() {
    constexpr std::string_view kKey = "general.alignment";
    to_.alignment_ = kGgufAlignment;
    const GgufValue* value = to_.find(kKey);
    if (value == nullptr) return {};
    if (value->type() == GgufType::u32) to_.alignment_ = load<std::uint32_t>(value->encoded());
    if (value->type() == GgufType::u32 && std::has_single_bit(to_.alignment_)) return {};
    return refuse(of_key(kKey) + found(*value) + ", expected a u32 that is a power of two");
  }

  Status tensor(std::uint64_t i) {
    const auto number_of = [&] { return "tensor " + dec(i + 1) + ": "; };
    GgufTensor t;
    BITTERN_TRY(take_string(t.name, number_of));
    if (t.name.empty() || t.name.size() > kGgufMostNameBytes) {
      return refuse(number_of() + "a name of " + dec(t.name.size()) + " bytes, expected 1.." +
                    dec(kGgufMostNameBytes));
    }
    const auto where = [&] { return of_tensor(t.name); };
    std::uint32_t rank = 0, type = 0;
    BITTERN_TRY(take(rank, where));
    if (rank > std::uint32_t{kGgufMostRank}) {
      return refuse(where() + "rank " + dec(rank) + ", expected at most " +
                    std::to_string(kGgufMostRank));
    }
    t.shape.rank = static_cast<int>(rank);
    for (int d = t.shape.rank - 1; d >= 0; --d) {
      std::uint64_t dim = 0;
      BITTERN_TRY(take(dim, where));
      if (dim > std::uint64_t{kMost}) {
        return refuse(where() + "dimension " + dec(dim) + ", expected at most " +
                      std::to_string(kMost));
      }
      t.shape[d] = static_cast<std::int64_t>(dim);
    }
    BITTERN_TRY(take(type, where));
    if (ggml_type(type) == nullptr) {
      return unsupported(path_ + ": " + where() + "type " + dec(type) +
                         ", expected one that ggml has");
    }
    t.type = static_cast<GgmlType>(type);
    const auto size = ggml_bytes(t.type, t.shape);
    if (!size) return refuse(where() + std::string(size.status().message()));
    std::uint64_t offset = 0;
    BITTERN_TRY(take(offset, where));
    if (offset % to_.alignment_ != 0) {
      return refuse(where() + "offset " + dec(offset) + ", expected a multiple of " +
                    dec(to_.alignment_));
    }
    places_.push_back({offset, *size});
    to_.tensors_.push_back(t);
    return {};
  }

  // The bytes of every tensor, now that it is known where the data begin.
  Status place() {
    const std::uint64_t start =
        std::min<std::uint64_t>(aligned_to(at_, to_.alignment_), file_.size());
    const std::uint64_t data = file_.size() - start;
    for (std::size_t i = 0; i < places_.size(); ++i) {
      GgufTensor& t = to_.tensors_[i];
      const auto& [offset, size] = places_[i];
      if (offset > data || size > data - offset) {
        return refuse(of_tensor(t.name) + dec(size) + " bytes at offset " + dec(offset) +
                      ", expected within the " + dec(data) + " bytes of data");
      }
      t.bytes = file_.subspan(start + offset, size);
    }
    const auto order = sorted_by(to_.tensors_, [](const GgufTensor& t) {
      return std::pair(t.bytes.data(), t.bytes.size());
    });
    const GgufTensor* last = nullptr;
    for (const std::uint32_t i : order) {
      const GgufTensor& t = to_.tensors_[i];
      if (t.bytes.empty()) continue;
      if (last != nullptr && t.bytes.data() < last->bytes.data() + last->bytes.size()) {
        return refuse(of_tensor(t.name) + "offset " + dec(places_[i].offset) +
                      " lies within tensor " + shown(last->name) + ", expected no overlap");
      }
      last = &t;
    }
    return {};
  }

  GgufFile& to_;
  const std::string& path_;
  std::span<const std::byte> file_, bytes_;
  std::uint64_t at_ = 0;
  std::uint64_t tensor_count_ = 0, key_count_ = 0;
  struct Place {
    std::uint64_t offset, size;
  };
  std::vector<Place> places_;  // of the tensors, until it is known where the data begin
};

Status GgufFile::read(MappedFile file) {
  path_ = file.path();
  parts_.push_back(std::move(file));
  // What is checked now and looked at later must not change in between, as a mapped file may. So
  // the head is walked once for its size, copied, and read from the copy.
  const MappedFile& mapped = parts_[0];
  std::uint64_t head = 0;
  {
    GgufFile trial;
    GgufReader reader(trial, mapped, mapped.bytes());
    BITTERN_TRY(reader.read());
    head = reader.head_bytes();
  }
  const auto bytes = mapped.bytes().first(head);
  heads_.emplace_back(bytes.begin(), bytes.end());
  BITTERN_TRY(GgufReader(*this, mapped, heads_[0]).read());
  return index_tensors();
}

Status GgufFile::index_tensors() {
  tensors_by_name_ = sorted_by(tensors_, name_of);
  for (std::size_t i = 1; i < tensors_.size(); ++i) {
    const GgufTensor& a = tensors_[tensors_by_name_[i - 1]];
    const GgufTensor& b = tensors_[tensors_by_name_[i]];
    if (a.name == b.name) {
      return invalid(parts_[std::max(a.part, b.part)].path() + ": " + of_tensor(a.name) +
                     "given twice, expected once");
    }
  }
  return {};
}

// Opens the other parts of this one, and becomes all of them.
Status GgufFile::join_parts() {
  const auto here = uint("split.no");
  const auto count = uint("split.count");
  if (!here) return here.status();
  if (*count > 65535) return invalid(path_ + ": " + dec(*count) + " parts, expected at most 65535");
  if (*here >= *count) {
    return invalid(path_ + ": " + part_name(*here, *count) + ", expected a part of 1.." +
                   dec(*count));
  }
  const std::string suffix = part_suffix(*here, *count);
  if (!path_.ends_with(suffix)) {
    return invalid(path_ + ": " + part_name(*here, *count) + ", expected a name that ends in " +
                   suffix);
  }
  const std::string prefix = path_.substr(0, path_.size() - kPartSuffix);

  GgufFile own = std::move(*this);
  GgufFile all;
  std::uint64_t expected = 0;
  for (std::uint64_t part = 0; part < *count; ++part) {
    GgufFile one;
    if (part == *here) {
      one = std::exchange(own, GgufFile());
    } else {
      const std::string path = prefix + part_suffix(part, *count);
      auto file = MappedFile::open(path);
      if (!file) {
        return {file.status().code(), std::string(file.status().message()) + ", expected " +
                                          part_name(part, *count) + " of " + prefix};
      }
      BITTERN_TRY(one.read(std::move(*file)));
      const auto its_part = one.uint("split.no");
      const auto its_count = one.uint("split.count");
      if (!its_part) return its_part.status();
      if (!its_count) return its_count.status();
      if (*its_part != part || *its_count != *count) {
        return invalid(path + ": " + part_name(*its_part, *its_count) + ", expected " +
                       part_name(part, *count));
      }
    }
    if (part == 0) {
      const auto total = one.uint("split.tensors.count");
      if (!total) return total.status();
      expected = *total;
      if (expected > kGgufMostTensors) {
        return invalid(one.path_ + ": " + dec(expected) + " tensors, expected at most " +
                       dec(kGgufMostTensors));
      }
      all.path_ = one.path_;
      all.version_ = one.version_;
      all.alignment_ = one.alignment_;
      all.keys_ = std::move(one.keys_);
      all.keys_by_name_ = std::move(one.keys_by_name_);
    }
    if (one.tensors_.size() > expected - all.tensors_.size()) {
      return invalid(one.path_ + ": " + dec(all.tensors_.size() + one.tensors_.size()) +
                     " tensors so far, expected " + dec(expected) + " in all parts");
    }
    for (GgufTensor t : one.tensors_) {
      t.part = static_cast<std::uint32_t>(part);
      all.tensors_.push_back(t);
    }
    all.parts_.push_back(std::move(one.parts_[0]));
    all.heads_.push_back(std::move(one.heads_[0]));
  }
  if (all.tensors_.size() != expected) {
    return invalid(all.path_ + ": " + dec(all.tensors_.size()) +
                   " tensors in all parts, expected " + dec(expected));
  }
  BITTERN_TRY(all.index_tensors());
  *this = std::move(all);
  return {};
}

Result<GgufFile> GgufFile::open(const std::string& path, bool alone) {
  try {
    auto file = MappedFile::open(path);
    if (!file) return file.status();
    GgufFile out;
    if (Status status = out.read(std::move(*file)); !status.ok()) return status;
    if (out.find("split.count") != nullptr && !alone) {
      const auto count = out.uint("split.count");
      if (!count) return count.status();
      if (*count > 1) {
        if (Status status = out.join_parts(); !status.ok()) return status;
      }
    }
    out.path_ = path;
    return out;
  } catch (const std::bad_alloc&) {
    return Status(Code::out_of_memory, path);
  }
}

// ---- what callers ask a file ----

const GgufValue* GgufFile::find(std::string_view key) const {
  const GgufKey* found = look_up(keys_, keys_by_name_, key, key_of);
  return found != nullptr ? &found->value : nullptr;
}

const GgufTensor* GgufFile::tensor(std::string_view name) const {
  return look_up(tensors_, tensors_by_name_, name, name_of);
}

namespace {

// The file that holds the metadata: of a split one, the first part.
std::string of_key_in(const GgufFile& file, std::string_view key) {
  return (file.parts().empty() ? file.path() : file.parts()[0].path()) + ": " + of_key(key);
}

Status mismatch(const GgufFile& file, std::string_view key, const GgufValue* value,
                const std::string& expected) {
  return invalid(of_key_in(file, key) + (value != nullptr ? found(*value) : "not there") +
                 ", expected " + expected);
}

template <class T>
Result<T> get(const GgufFile& file, std::string_view key, std::optional<T> (GgufValue::*as)() const,
              const char* expected) {
  const GgufValue* value = file.find(key);
  if (value != nullptr) {
    if (const auto x = (value->*as)()) return *x;
  }
  return mismatch(file, key, value, expected);
}

}  // namespace

Result<std::uint64_t> GgufFile::uint(std::string_view key) const {
  return get(*this, key, &GgufValue::as_uint, "an unsigned integer");
}
Result<std::int64_t> GgufFile::integer(std::string_view key) const {
  return get(*this, key, &GgufValue::as_integer, "an integer within s64");
}
Result<double> GgufFile::number(std::string_view key) const {
  return get(*this, key, &GgufValue::as_number, "a number");
}
Result<bool> GgufFile::boolean(std::string_view key) const {
  return get(*this, key, &GgufValue::as_bool, "a bool");
}
Result<std::string_view> GgufFile::string(std::string_view key) const {
  return get(*this, key, &GgufValue::as_string, "a string");
}

Result<GgufValue> GgufFile::array_of(std::string_view key, const char* expected,
                                     bool (*fits)(GgufType)) const {
  const GgufValue* value = find(key);
  if (value == nullptr || value->type() != GgufType::array || !fits(value->element()))
    return mismatch(*this, key, value, expected);
  return *value;
}

Result<GgufValue> GgufFile::array(std::string_view key) const {
  return array_of(key, "an array", [](GgufType) { return true; });
}

Result<std::vector<std::string_view>> GgufFile::strings(std::string_view key) const {
  const auto array =
      array_of(key, "an array of string", [](GgufType t) { return t == GgufType::string; });
  if (!array) return array.status();
  try {
    std::vector<std::string_view> out;
    out.reserve(array->size());
    array->each([&](const GgufValue& x) { out.push_back(*x.as_string()); });
    return out;
  } catch (const std::bad_alloc&) {
    return Status(Code::out_of_memory, of_key_in(*this, key) + "strings");
  }
}

namespace {

// One byte of a file may become eight here, so the count is bounded.
template <class T>
Result<std::vector<T>> convert(const GgufFile& file, std::string_view key, const GgufValue& array,
                               std::optional<T> (GgufValue::*as)() const, const char* expected) {
  if (array.size() > kGgufMostElements) {
    return invalid(of_key_in(file, key) + dec(array.size()) + " elements, expected at most " +
                   dec(kGgufMostElements));
  }
  try {
    std::vector<T> out;
    out.reserve(array.size());
    for (std::uint64_t i = 0; i < array.size(); ++i) {
      const GgufValue value = array.at(i);
      const auto x = (value.*as)();
      if (!x) return mismatch(file, key, &value, expected);
      out.push_back(*x);
    }
    return out;
  } catch (const std::bad_alloc&) {
    return Status(Code::out_of_memory, of_key_in(file, key) + "elements");
  }
}

}  // namespace

Result<std::vector<std::int64_t>> GgufFile::integers(std::string_view key) const {
  const auto array = array_of(key, "an array of integers", is_integer);
  if (!array) return array.status();
  return convert(*this, key, *array, &GgufValue::as_integer, "integers within s64");
}

Result<std::vector<double>> GgufFile::numbers(std::string_view key) const {
  const auto array = array_of(key, "an array of numbers", is_number);
  if (!array) return array.status();
  return convert(*this, key, *array, &GgufValue::as_number, "numbers");
}

Status GgufFile::readable(const GgufTensor& tensor) const {
  if (info(tensor.type).readable) return {};
  return unsupported(parts_[tensor.part].path() + ": unsupported type " + info(tensor.type).name +
                     " in tensor " + shown(tensor.name));
}

// ---- writing ----

GgufData::GgufData(const GgufValue& value)
    : type_(value.type()), depth_(depth_of(value)), bytes_(text(value.encoded())) {}

GgufData GgufData::empty_array(GgufType element, std::uint64_t count) {
  GgufData data;
  data.type_ = GgufType::array;
  data.depth_ = 1;
  data.put(static_cast<std::uint32_t>(element));
  data.put(count);
  return data;
}

void GgufData::put_string(std::string_view text) {
  put(std::uint64_t{text.size()});
  bytes_.append(text);
}

GgufData GgufData::strings(std::span<const std::string_view> values) {
  GgufData data = empty_array(GgufType::string, values.size());
  for (const std::string_view x : values) data.put_string(x);
  return data;
}

GgufData GgufData::arrays(std::span<const GgufData> values) {
  GgufData data = empty_array(GgufType::array, values.size());
  for (const GgufData& x : values) {
    data.depth_ = std::max(data.depth_, x.depth_ + 1);
    data.well_formed_ &= x.well_formed_ && x.type_ == GgufType::array;
    data.bytes_.append(x.bytes_);
  }
  return data;
}

Status GgufWriter::refuse(const std::string& what) const { return invalid(path_ + ": " + what); }

Status GgufWriter::add(std::string_view key, const GgufData& value) {
  if (began_) return refuse(of_key(key) + "added after begin, expected before");
  if (key.empty() || key.size() > kGgufMostKeyBytes) {
    return refuse(of_key(key) + "a name of " + dec(key.size()) + " bytes, expected 1.." +
                  dec(kGgufMostKeyBytes));
  }
  if (!value.well_formed_) return refuse(of_key(key) + "arrays of what is none, expected arrays");
  if (value.depth_ > kGgufMostDepth) {
    return refuse(of_key(key) + "arrays nested " + std::to_string(value.depth_) +
                  " deep, expected at most " + std::to_string(kGgufMostDepth));
  }
  if (keys_.size() == kGgufMostKeys)
    return refuse(of_key(key) + "too many keys, expected at most " + dec(kGgufMostKeys));
  if (keys_.contains(key)) return refuse(of_key(key) + "given twice, expected once");
  if (key == "general.alignment") {
    const std::uint32_t n =
        value.type() == GgufType::u32 ? load<std::uint32_t>(value.encoded()) : 0;
    if (!std::has_single_bit(n)) {
      return refuse(of_key(key) + name(value.type()) + (n > 0 ? " " + dec(n) : "") +
                    ", expected a u32 that is a power of two");
    }
    alignment_ = n;
  }
  try {
    keys_.emplace(key);
    const auto put = [&](auto x) {
      encoded_keys_.append(reinterpret_cast<const char*>(&x), sizeof x);
    };
    put(std::uint64_t{key.size()});
    encoded_keys_.append(key);
    put(static_cast<std::uint32_t>(value.type()));
    encoded_keys_.append(value.bytes_);
    return {};
  } catch (const std::bad_alloc&) {
    return {Code::out_of_memory, path_ + ": " + of_key(key) + "no room"};
  }
}

Status GgufWriter::add_tensor(std::string_view name, GgmlType type, const Shape& shape) {
  if (began_) return refuse(of_tensor(name) + "added after begin, expected before");
  if (name.empty() || name.size() > kGgufMostWrittenNameBytes) {
    return refuse(of_tensor(name) + "a name of " + dec(name.size()) + " bytes, expected 1.." +
                  dec(kGgufMostWrittenNameBytes));
  }
  const auto bytes = ggml_bytes(type, shape);
  if (!bytes) return refuse(of_tensor(name) + std::string(bytes.status().message()));
  if (tensors_.size() == kGgufMostTensors)
    return refuse(of_tensor(name) + "too many tensors, expected at most " + dec(kGgufMostTensors));
  if (*bytes > kMostBytes - data_bytes_) {
    return refuse(of_tensor(name) + dec(*bytes) + " bytes, expected fewer than 2^62 in all");
  }
  if (names_.contains(name)) return refuse(of_tensor(name) + "given twice, expected once");
  try {
    names_.emplace(name);
    tensors_.push_back({std::string(name), type, shape, *bytes});
    data_bytes_ += *bytes;
    info_bytes_ += 8 + name.size() + 4 + 8 * static_cast<std::uint64_t>(shape.rank) + 4 + 8;
    return {};
  } catch (const std::bad_alloc&) {
    return {Code::out_of_memory, path_ + ": " + of_tensor(name) + "no room"};
  }
}

std::uint64_t GgufWriter::header_bytes() const {
  return 4 + 4 + 8 + 8 + encoded_keys_.size() + info_bytes_;
}

std::uint64_t GgufWriter::file_bytes() const {
  std::uint64_t n = aligned_to(header_bytes(), alignment_);
  for (const Tensor& t : tensors_) n += aligned_to(t.bytes, alignment_);
  return n;
}

OutputLayout GgufWriter::lay_out() const {
  OutputLayout layout;
  OutputLayout::File& file = layout.files.emplace_back();
  file.name = path_;
  file.bytes = file_bytes();
  file.head = "GGUF";
  file.head.reserve(aligned_to(header_bytes(), alignment_));
  const auto encode = [&](auto x) {
    file.head.append(reinterpret_cast<const char*>(&x), sizeof x);
  };
  encode(std::uint32_t{3});
  encode(std::uint64_t{tensors_.size()});
  encode(std::uint64_t{keys_.size()});
  file.head += encoded_keys_;
  const std::uint64_t data = aligned_to(header_bytes(), alignment_);
  std::uint64_t offset = 0;
  for (const Tensor& t : tensors_) {
    encode(std::uint64_t{t.name.size()});
    file.head += t.name;
    encode(static_cast<std::uint32_t>(t.shape.rank));
    for (int d = t.shape.rank - 1; d >= 0; --d) encode(t.shape[d]);
    encode(static_cast<std::uint32_t>(t.type));
    encode(offset);
    layout.tensors.push_back({.begin = data + offset, .bytes = t.bytes});
    offset += aligned_to(t.bytes, alignment_);
  }
  file.head.resize(data, '\0');
  return layout;
}

Status GgufWriter::begin(bool force) {
  if (began_) return refuse("begun twice, expected once");
  auto file = PartialFile::create(path_, force);
  if (!file) return file.status();
  try {
    file_.emplace(std::move(*file));
    began_ = true;
    BITTERN_TRY(file_->check_room(file_bytes()));
    BITTERN_TRY(put(std::as_bytes(std::span(lay_out().files[0].head))));
  } catch (const std::bad_alloc&) {
    return {Code::out_of_memory, path_ + ": header"};
  }
  return finish_tensors();
}

// After an error it is not known how much was written: no more goes into that file.
Status GgufWriter::put(std::span<const std::byte> bytes) {
  Status status = file_->write(bytes);
  if (!status.ok()) file_.reset();
  return status;
}

Status GgufWriter::pad(std::uint64_t written) {
  static constexpr std::array<std::byte, 4096> kZeros{};
  for (std::uint64_t left = aligned_to(written, alignment_) - written; left > 0;) {
    const std::size_t n = std::min<std::uint64_t>(left, kZeros.size());
    BITTERN_TRY(put(std::span(kZeros).first(n)));
    left -= n;
  }
  return {};
}

Status GgufWriter::finish_tensors() {
  while (current_ < tensors_.size() && written_ == tensors_[current_].bytes) {
    BITTERN_TRY(pad(written_));
    ++current_;
    written_ = 0;
  }
  return {};
}

Status GgufWriter::write(std::string_view tensor, std::span<const std::byte> bytes) {
  if (!file_)
    return refuse(of_tensor(tensor) + "written outside begin and commit, expected within");
  if (bytes.empty()) return {};
  if (current_ == tensors_.size())
    return refuse(of_tensor(tensor) + "written after the last, expected commit");
  const Tensor& t = tensors_[current_];
  if (t.name != tensor) {
    return refuse(of_tensor(tensor) + "written after " + dec(written_) + " of " + dec(t.bytes) +
                  " bytes of " + shown(t.name) + ", expected all of these first");
  }
  if (bytes.size() > t.bytes - written_) {
    return refuse(of_tensor(tensor) + dec(bytes.size()) + " bytes more, expected at most " +
                  dec(t.bytes - written_));
  }
  BITTERN_TRY(put(bytes));
  written_ += bytes.size();
  return finish_tensors();
}

Status GgufWriter::commit() {
  if (!file_) return refuse("committed before begin or twice, expected once after it");
  if (current_ < tensors_.size()) {
    const Tensor& t = tensors_[current_];
    return refuse(of_tensor(t.name) + dec(written_) + " bytes written, expected " + dec(t.bytes));
  }
  BITTERN_TRY(file_->commit());
  file_.reset();
  return {};
}

}  // namespace bittern
