#include "formats/gguf_contents.h"

#include <bit>

#include "core/guarded.h"
#include "formats/gguf_detail.h"

namespace bittern {

using namespace gguf_detail;

namespace {

constexpr std::uint64_t kMostBytes = (std::uint64_t{1} << 62) - 1;  // of tensors written

}  // namespace

GgufData::GgufData(const GgufValue& value) : type_(value.type()), bytes_(text(value.encoded())) {}

GgufData GgufData::empty_array(GgufType element, std::uint64_t count) {
  GgufData data;
  data.type_ = GgufType::array;
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

Status GgufContents::refuse(const std::string& what) const { return invalid(path_ + ": " + what); }

Status GgufContents::add(std::string_view key, const GgufData& value) {
  if (key.empty() || key.size() > kGgufMostKeyBytes) {
    return refuse(of_key(key) + "a name of " + dec(key.size()) + " bytes, expected 1.." +
                  dec(kGgufMostKeyBytes));
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
  } catch (...) {
    return caught(path_);
  }
}

Status GgufContents::add_tensor(std::string_view name, GgmlType type, const Shape& shape) {
  if (name.empty() || name.size() > kGgufMostWrittenNameBytes) {
    return refuse(of_tensor(name) + "a name of " + dec(name.size()) + " bytes, expected 1.." +
                  dec(kGgufMostWrittenNameBytes));
  }
  const auto bytes = ggml_bytes(type, shape);
  throw_if_out_of_memory(bytes.status());
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
  } catch (...) {
    return caught(path_);
  }
}

std::uint64_t GgufContents::header_bytes() const {
  return 4 + 4 + 8 + 8 + encoded_keys_.size() + info_bytes_;
}

std::uint64_t GgufContents::file_bytes() const {
  std::uint64_t n = aligned_to(header_bytes(), alignment_);
  for (const Tensor& t : tensors_) n += aligned_to(t.bytes, alignment_);
  return n;
}

OutputLayout GgufContents::lay_out() const {
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

}  // namespace bittern
