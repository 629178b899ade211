// One safetensors file: its header, read without trust.
#include "formats/safetensors.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "core/guarded.h"
#include "formats/json_events.h"
#include "formats/safetensors_detail.h"

namespace bittern {

using namespace safetensors_detail;

std::string safetensors_detail::list(std::span<const std::uint64_t> values) {
  std::string s = "[";
  for (std::size_t i = 0; i < values.size(); ++i)
    s.append(i == 0 ? "" : ",").append(std::to_string(values[i]));
  return s + "]";
}

Result<std::uint64_t> safetensors_detail::byte_size(const std::string& tensor,
                                                    const SafetensorsSpec& spec) {
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

Status safetensors_detail::check_name(const std::string& where, std::string_view name) {
  if (name.size() <= kSafetensorsMaxName) return {};
  return invalid(tensor_in(where, name) + "a name of " + std::to_string(name.size()) +
                 " bytes, expected at most " + std::to_string(kSafetensorsMaxName));
}

Status safetensors_detail::sort_metadata(const std::string& where, SafetensorsMetadata& metadata) {
  std::sort(metadata.begin(), metadata.end());
  const auto twice =
      std::adjacent_find(metadata.begin(), metadata.end(),
                         [](const auto& a, const auto& b) { return a.first == b.first; });
  if (twice == metadata.end()) return {};
  return invalid(where + ": __metadata__: " + in_quotes(twice->first) +
                 ": given twice, expected once");
}

namespace {

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
  std::string tensor() const { return tensor_in(where_, now_.name); }

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
          for (int i = 0; i < kSafeDTypeCount; ++i)
            names.append(names.empty() ? "" : " ").append(name(static_cast<SafeDType>(i)));
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
      return invalid(tensor_in(where, tensor.name) + "data_offsets " + range + " overlap tensor " +
                     in_quotes(before->name) + "; tensors must not overlap");
    }
    if (tensor.begin > end) {
      return invalid(tensor_in(where, tensor.name) + "data_offsets " + range + " leave a hole of " +
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

}  // namespace

const SafetensorsTensor* SafetensorsHeader::find(std::string_view name) const {
  const auto at =
      std::lower_bound(by_name.begin(), by_name.end(), name,
                       [&](std::uint32_t i, std::string_view n) { return tensors[i].name < n; });
  return at == by_name.end() || tensors[*at].name != name ? nullptr : &tensors[*at];
}

Result<SafetensorsHeader> parse_safetensors(const std::string& where,
                                            std::span<const std::byte> file) {
  return guarded(where, [&]() -> Result<SafetensorsHeader> {
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

Result<SafetensorsFile> SafetensorsFile::open(const std::string& path) {
  auto file = MappedFile::open(path);
  if (!file) return file.status();
  auto header = parse_safetensors(path, file->bytes());
  if (!header) return header.status();
  return SafetensorsFile(std::move(*file), std::move(*header));
}

}  // namespace bittern
