#include "formats/safetensors.h"

#include <algorithm>
#include <filesystem>
#include <new>
#include <nlohmann/json.hpp>
#include <numeric>
#include <tuple>

#include "formats/json_events.h"
#include "formats/side_file.h"

namespace bittern {
namespace {

using Json = nlohmann::json;

constexpr const char* kMetadata = "__metadata__";
constexpr const char* kSingle = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";

struct DTypeRow {
  const char* name;
  int bits;
};
constexpr DTypeRow kDTypes[kSafeDTypeCount] = {
    {"BOOL", 8},        {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},
    {"I8", 8},          {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
    {"F8_E5M2FNUZ", 8}, {"I16", 16},    {"U16", 16},    {"F16", 16},    {"BF16", 16},
    {"I32", 32},        {"U32", 32},    {"F32", 32},    {"C64", 64},    {"F64", 64},
    {"I64", 64},        {"U64", 64},
};

std::string list(std::span<const std::uint64_t> values) {
  std::string s = "[";
  for (std::size_t i = 0; i < values.size(); ++i)
    s.append(i == 0 ? "" : ",").append(std::to_string(values[i]));
  return s + "]";
}

std::string tensor_of(const std::string& where, std::string_view name) {
  return where + ": tensor " + in_quotes(name) + ": ";
}

// Bytes of a tensor. No product of some of its dimensions overflows either, a zero or not.
Result<std::uint64_t> byte_size(const std::string& tensor, const SafetensorsSpec& spec) {
  const auto refuse = [&](const std::string& what) {
    return invalid(tensor + "shape " + list(spec.shape) + " of " + name(spec.dtype) + what);
  };
  if (spec.shape.size() > kSafetensorsMaxRank) {
    return invalid(tensor + "rank " + std::to_string(spec.shape.size()) + ", expected at most " +
                   std::to_string(kSafetensorsMaxRank));
  }
  auto bits = static_cast<std::uint64_t>(bits_of(spec.dtype));
  bool empty = false;
  for (const std::uint64_t dim : spec.shape) {
    empty = empty || dim == 0;
    if (dim != 0 && __builtin_mul_overflow(bits, dim, &bits))
      return refuse(", expected less than 2^61 bytes");
  }
  if (empty) return std::uint64_t{0};
  if (bits % 8 != 0) return refuse(", expected whole bytes");
  return bits / 8;
}

Status check_name(const std::string& where, std::string_view name) {
  if (name.size() <= kSafetensorsMaxName) return {};
  return invalid(tensor_of(where, name) + "a name of " + std::to_string(name.size()) +
                 " bytes, expected at most " + std::to_string(kSafetensorsMaxName));
}

// ---- the header ----

class HeaderEvents : public JsonEvents {
 public:
  HeaderEvents(const std::string& where, std::uint64_t header_size, std::uint64_t data_size)
      : JsonEvents(where + ": header", where + ": header: not valid JSON"),
        where_(where),
        data_begin_(8 + header_size),
        data_size_(data_size) {}

  SafetensorsHeader take() { return std::move(header_); }

 private:
  enum Field { dtype = 0, shape = 1, data_offsets = 2, other = 3 };

  Status refuse(const std::string& what) const { return invalid(tensor() + what); }
  std::string tensor() const { return tensor_of(where_, now_.name); }

  Status begin(bool object) override {
    switch (depth()) {
      case 0: return {};  // the text begins with '{'
      case 1:
        if (object) return {};
        if (in_metadata_) return invalid(where_ + ": __metadata__: a list, expected an object");
        return refuse("a list, expected an object");
      case 2:
        if (in_metadata_) return no_string();
        if (field_ == dtype) return refuse("dtype: not a string");
        if (object) return not_a_list();
        return {};
      default: return not_a_list();
    }
  }

  Status key(const std::string& text) override {
    if (depth() == 1) {
      in_metadata_ = text == kMetadata;
      if (in_metadata_) {
        if (std::exchange(seen_metadata_, true))
          return invalid(where_ + ": __metadata__: given twice, expected once");
        return {};
      }
      now_ = {};
      now_.name = text;
      BITTERN_TRY(check_name(where_, text));
      offsets_.clear();
      seen_ = 0;
      if (header_.tensors.size() == kSafetensorsMaxTensors) {
        return invalid(where_ + ": header: more than " + std::to_string(kSafetensorsMaxTensors) +
                       " tensors, expected fewer");
      }
      return {};
    }
    if (in_metadata_) {
      if (header_.metadata.size() == kSafetensorsMaxMetadata) {
        return invalid(where_ + ": __metadata__: more than " +
                       std::to_string(kSafetensorsMaxMetadata) + " entries, expected fewer");
      }
      header_.metadata.emplace_back(text, std::string());
      return {};
    }
    field_ = text == "dtype"          ? dtype
             : text == "shape"        ? shape
             : text == "data_offsets" ? data_offsets
                                      : other;
    if (field_ == other) {
      skip_value();  // as the reference implementation does
      return {};
    }
    if ((seen_ >> field_ & 1) != 0) return refuse(text + ": given twice, expected once");
    seen_ |= 1u << field_;
    return {};
  }

  Status scalar(const JsonScalar& value) override {
    switch (depth()) {
      case 0:
      case 1:
        if (!in_metadata_) return refuse(std::string(value.what()) + ", expected an object");
        if (value.kind == JsonScalar::null) return {};
        return invalid(where_ + ": __metadata__: " + value.what() + ", expected an object");
      case 2: {
        if (in_metadata_) {
          if (value.kind != JsonScalar::text) return no_string();
          header_.metadata.back().second = *value.string;
          return {};
        }
        if (field_ != dtype) return not_a_list();
        if (value.kind != JsonScalar::text) return refuse("dtype: not a string");
        const auto found = find_safe_dtype(*value.string);
        if (!found) {
          std::string names;
          for (const DTypeRow& row : kDTypes)
            names.append(names.empty() ? "" : " ").append(row.name);
          return unsupported(tensor() + "dtype " + in_quotes(*value.string) + ", expected one of " +
                             names);
        }
        now_.dtype = *found;
        return {};
      }
      default: {
        if (value.kind != JsonScalar::natural) return not_a_list();
        auto& values = field_ == shape ? now_.shape : offsets_;
        if (values.size() == kSafetensorsMaxRank) {
          return refuse(std::string(field_ == shape ? "shape" : "data_offsets") + ": more than " +
                        std::to_string(kSafetensorsMaxRank) + " numbers, expected fewer");
        }
        values.push_back(value.number);
        return {};
      }
    }
  }

  Status end() override {
    if (depth() != 1 || in_metadata_) return {};
    constexpr const char* kFields[] = {"dtype", "shape", "data_offsets"};
    for (int i = 0; i < 3; ++i)
      if ((seen_ >> i & 1) == 0) return refuse(std::string("no ") + kFields[i] + ", expected one");
    if (offsets_.size() != 2)
      return refuse("data_offsets " + list(offsets_) + ", expected two numbers");
    const std::uint64_t from = offsets_[0], to = offsets_[1];
    if (from > to) return refuse("data_offsets " + list(offsets_) + ", expected begin <= end");
    if (to > data_size_) {
      return refuse("data_offsets " + list(offsets_) + ", expected within the " +
                    std::to_string(data_size_) + " bytes of data");
    }
    const auto size = byte_size(tensor(), now_);
    if (!size) return size.status();
    if (to - from != *size) {
      return refuse("data_offsets " + list(offsets_) + ", expected " + std::to_string(*size) +
                    " bytes for shape " + list(now_.shape) + " of " + name(now_.dtype));
    }
    now_.begin = data_begin_ + from;
    now_.end = data_begin_ + to;
    now_.shape.shrink_to_fit();
    header_.tensors.push_back(std::move(now_));
    return {};
  }

  Status not_a_list() const {
    return refuse(std::string(field_ == shape ? "shape" : "data_offsets") +
                  ": not a list of whole numbers >= 0");
  }
  Status no_string() const {
    return invalid(where_ + ": __metadata__: " + in_quotes(header_.metadata.back().first) +
                   ": not a string");
  }

  std::string where_;
  std::uint64_t data_begin_, data_size_;
  SafetensorsHeader header_;
  SafetensorsTensor now_;
  std::vector<std::uint64_t> offsets_;
  Field field_ = other;
  unsigned seen_ = 0;  // a bit for each field
  bool in_metadata_ = false, seen_metadata_ = false;
};

// Every byte of the data belongs to exactly one tensor.
Status check_cover(const std::string& where, const SafetensorsHeader& header,
                   std::uint64_t data_begin, std::uint64_t file_size) {
  std::uint64_t end = data_begin;
  const SafetensorsTensor* before = nullptr;
  for (const SafetensorsTensor& tensor : header.tensors) {
    const std::string range = list(std::vector{tensor.begin - data_begin, tensor.end - data_begin});
    if (tensor.begin < end) {
      return invalid(tensor_of(where, tensor.name) + "data_offsets " + range + " overlap tensor " +
                     in_quotes(before->name) + ", expected none to");
    }
    if (tensor.begin > end) {
      return invalid(tensor_of(where, tensor.name) + "data_offsets " + range + " leave a hole of " +
                     std::to_string(tensor.begin - end) + " bytes before it, expected none");
    }
    end = tensor.end;
    before = &tensor;
  }
  if (end != file_size) {
    return invalid(where + ": " + std::to_string(file_size - end) +
                   " bytes at the end belong to no tensor, expected none");
  }
  return {};
}

Status sort_metadata(const std::string& where, SafetensorsMetadata& metadata) {
  std::sort(metadata.begin(), metadata.end());
  const auto twice =
      std::adjacent_find(metadata.begin(), metadata.end(),
                         [](const auto& a, const auto& b) { return a.first == b.first; });
  if (twice == metadata.end()) return {};
  return invalid(where + ": __metadata__: " + in_quotes(twice->first) +
                 ": given twice, expected once");
}

// The order of `tensors` by name, without duplicates.
Status sort_names(const std::string& where, const auto& tensors,
                  std::vector<std::uint32_t>& by_name) {
  by_name.resize(tensors.size());
  std::iota(by_name.begin(), by_name.end(), 0u);
  std::sort(by_name.begin(), by_name.end(),
            [&](auto a, auto b) { return tensors[a].name < tensors[b].name; });
  const auto twice = std::adjacent_find(by_name.begin(), by_name.end(), [&](auto a, auto b) {
    return tensors[a].name == tensors[b].name;
  });
  if (twice == by_name.end()) return {};
  return invalid(tensor_of(where, tensors[*twice].name) + "given twice, expected once");
}

// ---- the index ----

class IndexEvents : public JsonEvents {
 public:
  explicit IndexEvents(const std::string& where)
      : JsonEvents(where, where + ": not valid JSON"), where_(where) {}

  SafetensorsIndex index;
  bool seen_map = false;

 private:
  static constexpr std::size_t kMostEntries = std::size_t{1} << 20;

  Status begin(bool object) override {
    if (depth() > 1) return no_string();
    if (object) return {};
    return invalid(where_ + (depth() == 0 ? "" : ": weight_map") + ": a list, expected an object");
  }
  Status key(const std::string& text) override {
    if (depth() == 1) {
      if (text != "weight_map") {
        skip_value();
      } else if (std::exchange(seen_map, true)) {
        return invalid(where_ + ": weight_map: given twice, expected once");
      }
      return {};
    }
    if (index.weight_map.size() == kMostEntries) {
      return invalid(where_ + ": weight_map: more than " + std::to_string(kMostEntries) +
                     " entries, expected fewer");
    }
    BITTERN_TRY(check_name(where_, text));
    index.weight_map.emplace_back(text, 0u);
    return {};
  }
  Status scalar(const JsonScalar& value) override {
    if (depth() == 0) return invalid(where_ + ": " + value.what() + ", expected an object");
    if (depth() == 1)
      return invalid(where_ + ": weight_map: " + value.what() + ", expected an object");
    if (value.kind != JsonScalar::text) return no_string();
    const std::string& shard = *value.string;
    // A shard lies beside its index: nothing of the name may lead elsewhere.
    if (shard.empty() || shard == "." || shard == ".." ||
        shard.find_first_of(std::string_view("/\\\0", 3)) != std::string::npos) {
      return invalid(tensor_of(where_, index.weight_map.back().first) + "shard " +
                     in_quotes(shard) + ", expected the name of a file beside the index");
    }
    auto at = std::lower_bound(
        order_.begin(), order_.end(), shard,
        [&](std::uint32_t i, const std::string& s) { return index.shards[i] < s; });
    if (at == order_.end() || index.shards[*at] != shard) {
      if (index.shards.size() == kSafetensorsMaxShards) {
        return invalid(where_ + ": weight_map: more than " + std::to_string(kSafetensorsMaxShards) +
                       " shards, expected fewer");
      }
      at = order_.insert(at, static_cast<std::uint32_t>(index.shards.size()));
      index.shards.push_back(shard);
    }
    index.weight_map.back().second = *at;
    return {};
  }
  Status end() override {
    if (depth() != 0) return {};
    // From the order of appearance to that of the names.
    std::vector<std::uint32_t> rank(order_.size());
    std::vector<std::string> sorted;
    for (std::size_t i = 0; i < order_.size(); ++i) {
      rank[order_[i]] = static_cast<std::uint32_t>(i);
      sorted.push_back(std::move(index.shards[order_[i]]));
    }
    index.shards = std::move(sorted);
    for (auto& [tensor, shard] : index.weight_map) shard = rank[shard];
    return {};
  }
  Status no_string() const {
    return invalid(tensor_of(where_, index.weight_map.back().first) +
                   "shard: not a string, expected a file's name");
  }

  std::string where_;
  std::vector<std::uint32_t> order_;  // shards by name
};

std::string with_slash(const std::string& folder) {
  return folder.empty() || folder.back() == '/' ? folder : folder + "/";
}

template <class T, class F>
Result<T> guarded(const std::string& where, F&& f) {
  try {
    return f();
  } catch (const std::bad_alloc&) {
    return Status(Code::out_of_memory, where + ": out of memory");
  }
}

}  // namespace

// ---- dtypes ----

const char* name(SafeDType dtype) { return kDTypes[static_cast<int>(dtype)].name; }
int bits_of(SafeDType dtype) { return kDTypes[static_cast<int>(dtype)].bits; }

std::optional<SafeDType> find_safe_dtype(std::string_view name) {
  for (int i = 0; i < kSafeDTypeCount; ++i)
    if (name == kDTypes[i].name) return static_cast<SafeDType>(i);
  return std::nullopt;
}

std::optional<DType> to_dtype(SafeDType dtype) {
  for (int i = 0; i < kDTypeCount; ++i)
    if (to_safe_dtype(static_cast<DType>(i)) == dtype) return static_cast<DType>(i);
  return std::nullopt;
}

SafeDType to_safe_dtype(DType dtype) {
  constexpr SafeDType kOurs[kDTypeCount] = {
      SafeDType::f32, SafeDType::f64, SafeDType::f16, SafeDType::bf16,
      SafeDType::u8,  SafeDType::i8,  SafeDType::i32, SafeDType::u32,
  };
  return kOurs[static_cast<int>(dtype)];
}

// ---- reading ----

const SafetensorsTensor* SafetensorsHeader::find(std::string_view name) const {
  const auto at =
      std::lower_bound(by_name.begin(), by_name.end(), name,
                       [&](std::uint32_t i, std::string_view n) { return tensors[i].name < n; });
  return at == by_name.end() || tensors[*at].name != name ? nullptr : &tensors[*at];
}

Result<SafetensorsHeader> parse_safetensors(const std::string& where,
                                            std::span<const std::byte> file) {
  return guarded<SafetensorsHeader>(where, [&]() -> Result<SafetensorsHeader> {
    if (file.size() < 8)
      return invalid(where + ": " + std::to_string(file.size()) + " bytes, expected at least 8");
    std::uint64_t size = 0;
    for (std::size_t i = 8; i-- > 0;) size = size << 8 | static_cast<std::uint64_t>(file[i]);
    const std::uint64_t most = std::min<std::uint64_t>(kSafetensorsMaxHeader, file.size() - 8);
    if (size > most) {
      return invalid(where + ": header of " + std::to_string(size) + " bytes, expected at most " +
                     std::to_string(most));
    }
    const auto text = file.subspan(8, size);
    // The format says so, and it keeps byte order marks out.
    if (text.empty() || text[0] != std::byte{'{'})
      return invalid(where + ": header: does not begin with '{', expected a JSON object");
    HeaderEvents events(where, size, file.size() - 8 - size);
    BITTERN_TRY(events.parse(text));
    SafetensorsHeader header = events.take();
    BITTERN_TRY(sort_metadata(where, header.metadata));
    std::sort(header.tensors.begin(), header.tensors.end(), [](const auto& a, const auto& b) {
      return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
    });
    BITTERN_TRY(sort_names(where, header.tensors, header.by_name));
    BITTERN_TRY(check_cover(where, header, 8 + size, file.size()));
    return header;
  });
}

Result<SafetensorsIndex> parse_safetensors_index(const std::string& where,
                                                 std::span<const std::byte> json) {
  return guarded<SafetensorsIndex>(where, [&]() -> Result<SafetensorsIndex> {
    if (json.size() > kSafetensorsMaxHeader) {
      return invalid(where + ": " + std::to_string(json.size()) + " bytes, expected at most " +
                     std::to_string(kSafetensorsMaxHeader));
    }
    IndexEvents events(where);
    BITTERN_TRY(events.parse(json));
    auto& map = events.index.weight_map;
    if (!events.seen_map || map.empty())
      return invalid(where + ": no weight_map with a tensor, expected one");
    std::sort(map.begin(), map.end());
    const auto twice = std::adjacent_find(
        map.begin(), map.end(), [](const auto& a, const auto& b) { return a.first == b.first; });
    if (twice != map.end())
      return invalid(tensor_of(where, twice->first) + "given twice, expected once");
    return std::move(events.index);
  });
}

Result<SafetensorsFile> SafetensorsFile::open(const std::string& path) {
  auto file = MappedFile::open(path);
  if (!file) return file.status();
  auto header = parse_safetensors(path, file->bytes());
  if (!header) return header.status();
  return SafetensorsFile(std::move(*file), std::move(*header));
}

void SafetensorsFolder::sort_names() {
  by_name_.resize(size());
  std::iota(by_name_.begin(), by_name_.end(), 0u);
  std::sort(by_name_.begin(), by_name_.end(),
            [&](auto a, auto b) { return tensor(a).name < tensor(b).name; });
}

std::optional<std::size_t> SafetensorsFolder::find(std::string_view name) const {
  const auto at =
      std::lower_bound(by_name_.begin(), by_name_.end(), name,
                       [&](std::uint32_t i, std::string_view n) { return tensor(i).name < n; });
  if (at == by_name_.end() || tensor(*at).name != name) return std::nullopt;
  return *at;
}

Result<SafetensorsFolder> SafetensorsFolder::open(const std::string& folder) {
  return guarded<SafetensorsFolder>(folder, [&]() -> Result<SafetensorsFolder> {
    const std::string beside = with_slash(folder);
    SafetensorsFolder model;
    if (!is_there(beside + kIndex)) {
      if (!is_there(beside + kSingle)) {
        return unavailable(folder + ": neither " + kIndex + " nor " + kSingle + ", expected one");
      }
      auto file = SafetensorsFile::open(beside + kSingle);
      if (!file) return file.status();
      for (std::uint32_t i = 0; i < file->tensors().size(); ++i) model.entries_.push_back({0, i});
      model.files_.push_back(std::move(*file));
      model.sort_names();
      return model;
    }

    const auto text = MappedFile::open(beside + kIndex);
    if (!text) return text.status();
    const auto index = parse_safetensors_index(text->path(), text->bytes());
    if (!index) return index.status();
    std::size_t held = 0;
    for (const std::string& shard : index->shards) {
      auto file = SafetensorsFile::open(beside + shard);
      if (!file && file.status().code() == Code::unavailable) {
        return unavailable(std::string(file.status().message()) + ", expected a shard named by " +
                           kIndex);
      }
      if (!file) return file.status();
      held += file->tensors().size();
      model.files_.push_back(std::move(*file));
    }
    for (const auto& [name, shard] : index->weight_map) {
      const SafetensorsTensor* found = model.files_[shard].find(name);
      if (found == nullptr) {
        return invalid(tensor_of(text->path(), name) + "not in " + in_quotes(index->shards[shard]) +
                       ", expected there");
      }
      const auto number = found - model.files_[shard].tensors().data();
      model.entries_.push_back({shard, static_cast<std::uint32_t>(number)});
    }
    std::sort(model.entries_.begin(), model.entries_.end(), [](const Entry& a, const Entry& b) {
      return std::tie(a.file, a.tensor) < std::tie(b.file, b.tensor);
    });
    model.unlisted_ = held - model.entries_.size();
    model.sort_names();
    return model;
  });
}

// ---- writing ----

namespace {

// A JSON string, or nothing where `text` is not UTF-8.
std::optional<std::string> json_string(const std::string& text) {
  try {
    return Json(text).dump();
  } catch (const Json::exception&) {
    return std::nullopt;
  }
}

std::span<const std::byte> as_bytes(const std::string& text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

// A file that a loader of the folder takes for a part of the model.
bool is_part_of_model(const std::string& file) {
  if (file == kSingle || file == kIndex) return true;
  constexpr std::string_view kPattern = "model-#####-of-#####.safetensors";
  return file.size() == kPattern.size() &&
         std::equal(file.begin(), file.end(), kPattern.begin(), [](char c, char pattern) {
           return pattern == '#' ? c >= '0' && c <= '9' : c == pattern;
         });
}

std::vector<std::string> parts_of_model(const std::string& folder) {
  std::vector<std::string> parts;
  std::error_code error;
  for (std::filesystem::directory_iterator file(folder, error), end; !error && file != end;
       file.increment(error)) {
    std::string name = file->path().filename().string();
    if (is_part_of_model(name)) parts.push_back(std::move(name));
  }
  std::sort(parts.begin(), parts.end());
  return parts;
}

// Fills in the heads of files whose names are known and whose tensors know their file.
Status lay_out_files(const std::string& where, const std::string& folder,
                     std::span<const SafetensorsSpec> tensors, SafetensorsMetadata metadata,
                     OutputLayout& layout) {
  std::string opening = "{";
  BITTERN_TRY(sort_metadata(where, metadata));
  for (const auto& [key, value] : metadata) {
    const auto k = json_string(key), v = json_string(value);
    if (!k || !v)
      return invalid(where + ": __metadata__: " + in_quotes(key) + ": not UTF-8, expected UTF-8");
    opening += opening.size() == 1 ? std::string("\"__metadata__\":{") : std::string(",");
    opening += *k + ":" + *v;
  }
  if (!metadata.empty()) opening += "}";

  std::vector<std::uint32_t> order;
  BITTERN_TRY(sort_names(where, tensors, order));
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) {
    return std::tuple(layout.tensors[a].file, tensors[b].dtype) <
           std::tuple(layout.tensors[b].file, tensors[a].dtype);
  });
  std::size_t next = 0;
  for (std::uint32_t i = 0; i < layout.files.size(); ++i) {
    OutputLayout::File& file = layout.files[i];
    std::string header = opening;
    std::uint64_t offset = 0;
    const std::size_t first = next;
    for (; next < order.size() && layout.tensors[order[next]].file == i; ++next) {
      const SafetensorsSpec& tensor = tensors[order[next]];
      OutputLayout::Extent& extent = layout.tensors[order[next]];
      BITTERN_TRY(check_name(where, tensor.name));
      const auto escaped = json_string(tensor.name);
      if (!escaped || tensor.name == kMetadata) {
        return invalid(tensor_of(where, tensor.name) + (escaped ? "reserved" : "not UTF-8") +
                       ", expected another name");
      }
      header.append(header.size() == 1 ? "" : ",").append(*escaped).append(":{\"dtype\":\"");
      header.append(name(tensor.dtype)).append("\",\"shape\":").append(list(tensor.shape));
      extent.begin = offset;  // of the data, until the header's size is known
      offset += extent.bytes;
      header.append(",\"data_offsets\":").append(list(std::vector{extent.begin, offset}));
      header.append("}");
    }
    header += "}";
    header.append((8 - header.size() % 8) % 8, ' ');
    if (header.size() > kSafetensorsMaxHeader) {
      return invalid(folder + file.name + ": header of " + std::to_string(header.size()) +
                     " bytes, expected at most " + std::to_string(kSafetensorsMaxHeader));
    }
    for (std::size_t byte = 0; byte < 8; ++byte)
      file.head.push_back(static_cast<char>(header.size() >> (8 * byte) & 255));
    file.head += header;
    file.bytes = file.head.size() + offset;
    for (std::size_t t = first; t < next; ++t) layout.tensors[order[t]].begin += file.head.size();
  }
  return {};
}

Status size_tensors(const std::string& where, std::span<const SafetensorsSpec> tensors,
                    OutputLayout& layout) {
  std::uint64_t total = 0;
  for (const SafetensorsSpec& tensor : tensors) {
    const auto size = byte_size(tensor_of(where, tensor.name), tensor);
    if (!size) return size.status();
    layout.tensors.push_back({.bytes = *size});
    total += *size;
    if (total >> 61 != 0) return invalid(where + ": 2^61 bytes or more, expected less");
  }
  return {};
}

}  // namespace

Result<OutputLayout> lay_out_safetensors(const std::string& folder,
                                         std::span<const SafetensorsSpec> tensors,
                                         std::uint64_t shard_bytes, SafetensorsMetadata metadata) {
  return guarded<OutputLayout>(folder, [&]() -> Result<OutputLayout> {
    if (shard_bytes == 0) return invalid(folder + ": shards of 0 bytes, expected at least 1");
    OutputLayout layout;
    BITTERN_TRY(size_tensors(folder, tensors, layout));
    std::uint32_t shard = 0;
    std::uint64_t filled = 0;
    for (OutputLayout::Extent& tensor : layout.tensors) {
      if (filled != 0 && (filled > shard_bytes || tensor.bytes > shard_bytes - filled)) {
        ++shard;
        filled = 0;
      }
      tensor.file = shard;
      filled += tensor.bytes;
    }
    const std::uint32_t count = shard + 1;
    if (count > kSafetensorsMaxShards) {
      return invalid(folder + ": " + std::to_string(count) + " shards, expected at most " +
                     std::to_string(kSafetensorsMaxShards));
    }
    for (std::uint32_t i = 1; count > 1 && i <= count; ++i) {
      const auto five = [](std::uint32_t n) { return std::to_string(100000 + n).substr(1); };
      layout.files.push_back({.name = "model-" + five(i) + "-of-" + five(count) + ".safetensors"});
    }
    if (count == 1) layout.files.push_back({.name = kSingle});
    const std::string slashed = with_slash(folder);
    BITTERN_TRY(lay_out_files(slashed + (count == 1 ? kSingle : kIndex), slashed, tensors,
                              std::move(metadata), layout));
    return layout;
  });
}

Result<std::string> safetensors_index(const std::string& folder,
                                      std::span<const SafetensorsSpec> tensors,
                                      const OutputLayout& layout,
                                      std::span<const std::string> metadata) {
  std::vector<std::uint32_t> order;
  BITTERN_TRY(sort_names(with_slash(folder) + kIndex, tensors, order));
  std::string text = "{\n  \"metadata\": {";
  for (std::size_t i = 0; i < metadata.size(); ++i)
    text += (i == 0 ? "\n    " : ",\n    ") + metadata[i];
  text += "\n  },\n  \"weight_map\": {";
  for (std::size_t i = 0; i < order.size(); ++i) {
    text += (i == 0 ? "\n    " : ",\n    ") + *json_string(tensors[order[i]].name) + ": \"" +
            layout.files[layout.tensors[order[i]].file].name + "\"";
  }
  text += "\n  }\n}\n";
  return text;
}

Result<SafetensorsWriter> SafetensorsWriter::make(const std::string& folder,
                                                  std::vector<SafetensorsSpec> tensors,
                                                  OutputLayout layout, bool force) {
  SafetensorsWriter writer;
  writer.folder_ = folder;
  writer.force_ = force;
  std::uint64_t total = 0;
  for (const OutputLayout::File& file : layout.files) total += file.bytes;
  for (OutputLayout::File& laid_out : layout.files) {
    auto file = PartialFile::create(folder + laid_out.name, force);
    if (!file) return file.status();
    if (writer.files_.empty()) BITTERN_TRY(file->check_room(total));
    BITTERN_TRY(file->write(as_bytes(laid_out.head)));
    laid_out.head = {};
    writer.files_.push_back(std::move(*file));
  }
  writer.tensors_ = std::move(tensors);
  writer.layout_ = std::move(layout);
  writer.written_.resize(writer.tensors_.size());
  return writer;
}

Result<SafetensorsWriter> SafetensorsWriter::create(const std::string& path,
                                                    std::vector<SafetensorsSpec> tensors,
                                                    SafetensorsMetadata metadata, bool force) {
  return guarded<SafetensorsWriter>(path, [&]() -> Result<SafetensorsWriter> {
    OutputLayout layout;
    BITTERN_TRY(size_tensors(path, tensors, layout));
    layout.files.push_back({.name = path});
    BITTERN_TRY(lay_out_files(path, "", tensors, std::move(metadata), layout));
    return make("", std::move(tensors), std::move(layout), force);
  });
}

Result<SafetensorsWriter> SafetensorsWriter::create_folder(const std::string& folder,
                                                           std::vector<SafetensorsSpec> tensors,
                                                           std::uint64_t shard_bytes,
                                                           SafetensorsMetadata metadata,
                                                           bool force) {
  return guarded<SafetensorsWriter>(folder, [&]() -> Result<SafetensorsWriter> {
    if (const auto parts = parts_of_model(folder); !parts.empty() && !force) {
      return invalid(with_slash(folder) + parts[0] +
                     ": exists, expected a folder without a model (or force)");
    }
    auto layout = lay_out_safetensors(folder, tensors, shard_bytes, std::move(metadata));
    if (!layout) return layout.status();
    return make(with_slash(folder), std::move(tensors), std::move(*layout), force);
  });
}

Status SafetensorsWriter::append(std::size_t i, std::span<const std::byte> bytes) {
  if (i >= tensors_.size()) {
    return invalid(files_[0].path() + ": tensor " + std::to_string(i) + ", expected one of " +
                   std::to_string(tensors_.size()));
  }
  const OutputLayout::Extent& extent = layout_.tensors[i];
  PartialFile& file = files_[extent.file];
  if (bytes.size() > extent.bytes - written_[i]) {
    return invalid(tensor_of(file.path(), tensors_[i].name) +
                   std::to_string(written_[i] + bytes.size()) + " bytes, expected " +
                   std::to_string(extent.bytes));
  }
  BITTERN_TRY(file.pwrite(extent.begin + written_[i], bytes));
  written_[i] += bytes.size();
  return {};
}

Status SafetensorsWriter::write_index() {
  std::uint64_t total = 0;
  for (const OutputLayout::Extent& extent : layout_.tensors) total += extent.bytes;
  const std::string metadata[] = {"\"total_size\": " + std::to_string(total)};
  auto text = safetensors_index(folder_, tensors_, layout_, metadata);
  if (!text) return text.status();
  auto file = PartialFile::create(folder_ + kIndex, force_);
  if (!file) return file.status();
  BITTERN_TRY(file->write(as_bytes(*text)));
  return file->commit();
}

Status SafetensorsWriter::commit() {
  try {
    return commit_all();
  } catch (const std::bad_alloc&) {
    return {Code::out_of_memory, files_[0].path() + ": out of memory"};
  }
}

Status SafetensorsWriter::commit_all() {
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    const OutputLayout::Extent& extent = layout_.tensors[i];
    if (written_[i] == extent.bytes) continue;
    return invalid(tensor_of(files_[extent.file].path(), tensors_[i].name) +
                   std::to_string(written_[i]) + " bytes, expected " +
                   std::to_string(extent.bytes));
  }
  // An old index goes first: it must not describe the new shards.
  std::error_code error;
  const bool folder = !folder_.empty();
  if (folder && force_) std::filesystem::remove(folder_ + kIndex, error);
  if (error) return {Code::io_error, folder_ + kIndex + ": cannot remove: " + error.message()};
  for (PartialFile& file : files_) BITTERN_TRY(file.commit());
  if (!folder) return {};
  if (force_) {
    const auto is_ours = [&](const std::string& part) {
      return std::any_of(layout_.files.begin(), layout_.files.end(),
                         [&](const OutputLayout::File& file) { return file.name == part; });
    };
    for (const std::string& part : parts_of_model(folder_)) {
      if (is_ours(part)) continue;
      if (!std::filesystem::remove(folder_ + part, error) && error)
        return {Code::io_error, folder_ + part + ": cannot remove: " + error.message()};
    }
  }
  if (files_.size() == 1) return {};
  return write_index();
}

}  // namespace bittern
