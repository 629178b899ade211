// Opening a GGUF file: nothing that it claims is believed before it is checked.
#include <algorithm>
#include <bit>
#include <cinttypes>
#include <compare>
#include <cstdio>
#include <limits>
#include <numeric>
#include <utility>

#include "core/guarded.h"
#include "formats/gguf_detail.h"

namespace bittern {

using namespace gguf_detail;

namespace {

constexpr std::uint64_t kLeastKeyBytes = 8 + 1 + 4 + 1;         // a key of one letter, a u8
constexpr std::uint64_t kLeastTensorBytes = 8 + 1 + 4 + 4 + 8;  // a name of one letter, rank 0
constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();

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
    throw_if_out_of_memory(size.status());
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
                      " is within tensor " + shown(last->name) + ", expected no overlap");
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
  } catch (...) {
    return caught(path);
  }
}

}  // namespace bittern
