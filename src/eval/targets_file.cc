#include "eval/targets_file.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <tuple>

#include "convert/replace.h"
#include "formats/fingerprint.h"
#include "formats/safetensors_layout.h"

namespace bittern {
namespace {

constexpr const char* kKind = "bittern.targets";
constexpr const char* kVersion = "1";
constexpr std::size_t kReadAtOnce = std::size_t{1} << 20;  // a multiple of Checksum::kBlock

std::string hex(std::uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
  return text;
}

std::vector<SafetensorsSpec> specs(const TargetsKey& key) {
  const auto positions = static_cast<std::uint64_t>(key.positions);
  const auto top = static_cast<std::uint64_t>(key.top);
  return {{"ids", SafeDType::i32, {positions, top}},
          {"log_p", SafeDType::f32, {positions, top}},
          {"tail", SafeDType::f32, {positions}},
          {"right", SafeDType::f32, {positions}}};
}

SafetensorsMetadata metadata(const TargetsKey& key, std::uint64_t checksum) {
  SafetensorsMetadata all{{kKind, kVersion},
                          {"checksum", hex(checksum)},
                          {"context", std::to_string(key.context)},
                          {"dialect", key.dialect},
                          {"first", std::to_string(key.first)},
                          {"pieces", std::to_string(key.pieces)},
                          {"teacher", key.teacher},
                          {"tokens", key.tokens},
                          {"vocab", std::to_string(key.vocab)}};
  std::sort(all.begin(), all.end());
  return all;
}

std::string partial_of(const std::string& path) { return path + ".partial"; }

Status not_targets(const std::string& path, const std::string& why) {
  return invalid(path + ": " + why + ", expected a file of a teacher's targets");
}

// The tensor's numbers, if it is there as it should be.
template <class T>
Result<std::span<const T>> numbers(const SafetensorsFile& file, const SafetensorsSpec& spec) {
  const SafetensorsTensor* const tensor = file.find(spec.name);
  if (tensor == nullptr) return not_targets(file.path(), "has no tensor " + spec.name);
  if (tensor->dtype != spec.dtype || tensor->shape != spec.shape)
    return not_targets(file.path(), "the tensor " + spec.name + " has a wrong dtype or shape");
  const auto bytes = file.bytes(*tensor);
  if (reinterpret_cast<std::uintptr_t>(bytes.data()) % alignof(T) != 0)
    return not_targets(file.path(), "the tensor " + spec.name + " is not aligned");
  return std::span(reinterpret_cast<const T*>(bytes.data()), bytes.size() / sizeof(T));
}

}  // namespace

TargetsKey TargetsKey::of(std::span<const std::int32_t> tokens, const EvalOptions& options,
                          std::int64_t pieces) {
  TargetsKey key{
      .dialect = std::string(kPerplexityDialectNames[static_cast<std::size_t>(options.dialect)]),
      .context = options.context,
      .pieces = pieces,
      .first = options.first};
  key.tokens = hex(Checksum::of(std::as_bytes(tokens)));
  return key;
}

// ---- writing ----

Result<TargetsWriter> TargetsWriter::make(const std::string& path, const TargetsKey& key,
                                          bool replace) {
  const auto there = thing_at(path);
  if (!there) return there.status();
  if (*there != Thing::nothing) {
    if (*there != Thing::file) return invalid(path + ": " + name(*there) + ", expected a file");
    if (!replace) return invalid(path + ": exists, expected a new name");
    BITTERN_TRY(TargetsFile::check_ours(path));
  }
  const auto partial = thing_at(partial_of(path));
  if (!partial) return partial.status();
  if (*partial == Thing::file) BITTERN_TRY(TargetsFile::check_ours(partial_of(path)));
  auto layout = lay_out_safetensors(path, specs(key), UINT64_MAX, metadata(key, 0));
  if (!layout) return layout.status();
  // From the file's opening on nothing may fail before the writer has it, which removes it again.
  std::string own_path = path;
  TargetsKey own_key = key;
  auto file = WritableFile::open(partial_of(path), true);
  if (!file) return file.status();
  TargetsWriter writer(std::move(own_path), std::move(own_key), replace, std::move(*file));
  writer.layout_ = std::move(*layout);
  BITTERN_TRY(writer.file_.check_room(writer.layout_.files[0].bytes));
  BITTERN_TRY(writer.write_head(0));
  return writer;
}

TargetsWriter::~TargetsWriter() {
  if (file_.is_open() && file_.has_name()) ::unlink(file_.path().c_str());
}

Status TargetsWriter::write_head(std::uint64_t checksum) {
  // The checksum's text always has the same length, so nothing moves.
  auto layout = lay_out_safetensors(path_, specs(key_), UINT64_MAX, metadata(key_, checksum));
  if (!layout) return layout.status();
  if (layout->files[0].head.size() != layout_.files[0].head.size())
    return internal(path_ + ": its header has changed its size");
  return file_.pwrite(0, std::as_bytes(std::span(layout->files[0].head)));
}

Status TargetsWriter::add(std::span<const std::int32_t> ids, std::span<const float> log_p,
                          std::span<const float> tail, std::span<const float> right) {
  const auto put = [&](std::size_t tensor, std::int64_t row, std::span<const std::byte> bytes) {
    const std::uint64_t at = static_cast<std::uint64_t>(done_ * row) * sizeof(float);
    return file_.pwrite(layout_.tensors[tensor].begin + at, bytes);
  };
  BITTERN_TRY(put(0, key_.top, std::as_bytes(ids)));
  BITTERN_TRY(put(1, key_.top, std::as_bytes(log_p)));
  BITTERN_TRY(put(2, 1, std::as_bytes(tail)));
  BITTERN_TRY(put(3, 1, std::as_bytes(right)));
  done_ += static_cast<std::int64_t>(tail.size());
  return {};
}

Status TargetsWriter::finish() {
  if (done_ != key_.positions) return internal(path_ + ": positions are missing");
  const std::uint64_t end = layout_.files[0].bytes;
  std::vector<std::byte> part(kReadAtOnce);
  Checksum sum;
  for (std::uint64_t at = layout_.files[0].head.size(); at < end;) {
    const std::size_t count = std::min<std::uint64_t>(part.size(), end - at);
    if (!file_.pread(at, std::span(part).first(count)))
      return {Code::io_error, file_.path() + ": cannot read what was written to it"};
    sum.add(std::span(part).first(count));
    at += count;
  }
  BITTERN_TRY(write_head(sum.value()));
  BITTERN_TRY(file_.sync());
  const auto there = thing_at(path_);
  if (!there) return there.status();
  if (*there == Thing::nothing) {
    BITTERN_TRY(rename_new(file_.path(), path_));
  } else {
    if (!replace_) return invalid(path_ + ": was created in the meantime, expected a new name");
    BITTERN_TRY(TargetsFile::check_ours(path_));
    if (std::rename(file_.path().c_str(), path_.c_str()) != 0)
      return {Code::io_error, path_ + ": cannot rename " + file_.path() + " to it"};
  }
  file_.close();
  return sync_name(path_);
}

// ---- reading ----

Status TargetsFile::check_ours(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text(4096, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<std::size_t>(file.gcount()));
  if (!file.bad() && (text.empty() || text.find(kKind) != text.npos)) return {};
  return not_targets(path, "will not be replaced");
}

Result<TargetsFile> TargetsFile::open(const std::string& path) {
  auto opened = SafetensorsFile::open(path);
  if (!opened) return opened.status();
  const auto find = [&](std::string_view key) -> const std::string* {
    for (const auto& [k, v] : opened->metadata())
      if (k == key) return &v;
    return nullptr;
  };
  if (find(kKind) == nullptr) return not_targets(path, "something else");
  if (*find(kKind) != kVersion)
    return not_targets(path, "version " + *find(kKind) + ", expected " + kVersion);
  TargetsKey key;
  for (const auto& [name, value] :
       {std::pair("context", &key.context), std::pair("first", &key.first),
        std::pair("pieces", &key.pieces), std::pair("vocab", &key.vocab)}) {
    const std::string* const text = find(name);
    if (text == nullptr) return not_targets(path, std::string("has no ") + name);
    const char* const end = text->data() + text->size();
    const auto read = std::from_chars(text->data(), end, *value);
    if (read.ec != std::errc() || read.ptr != end)
      return not_targets(path, std::string(name) + " is no number");
  }
  for (const auto& [name, value] :
       {std::pair("dialect", &key.dialect), std::pair("tokens", &key.tokens),
        std::pair("teacher", &key.teacher)}) {
    const std::string* const text = find(name);
    if (text == nullptr) return not_targets(path, std::string("has no ") + name);
    *value = *text;
  }
  const SafetensorsTensor* const ids = opened->find("ids");
  if (ids == nullptr || ids->shape.size() != 2 || ids->shape[1] > INT32_MAX)
    return not_targets(path, "has no tensor ids of two axes");
  key.positions = static_cast<std::int64_t>(ids->shape[0]);
  key.top = static_cast<std::int64_t>(ids->shape[1]);
  if (key.vocab < 1 || key.vocab > INT32_MAX || key.top < 1 || key.top > key.vocab)
    return not_targets(path, std::to_string(key.top) + " tokens of " + std::to_string(key.vocab));

  TargetsFile file(std::move(*opened), std::move(key));
  const std::vector<SafetensorsSpec> all = specs(file.key_);
  const auto ids_of = numbers<std::int32_t>(file.file_, all[0]);
  if (!ids_of) return ids_of.status();
  file.ids_ = *ids_of;
  std::span<const float>* const floats[] = {&file.log_p_, &file.tail_, &file.right_};
  for (std::size_t i = 0; i < 3; ++i) {
    const auto found = numbers<float>(file.file_, all[i + 1]);
    if (!found) return found.status();
    *floats[i] = *found;
  }
  Checksum sum;
  const auto& tensors = file.file_.tensors();
  const std::byte* const begin = file.file_.bytes(tensors.front()).data();
  const auto last = file.file_.bytes(tensors.back());
  sum.add(std::span(begin, last.data() + last.size()));
  const std::string* const stored = [&]() -> const std::string* {
    for (const auto& [k, v] : file.file_.metadata())
      if (k == "checksum") return &v;
    return nullptr;
  }();
  if (stored == nullptr || *stored != hex(sum.value()))
    return not_targets(path, "its numbers are damaged (their checksum differs)");
  BITTERN_TRY(file.check_values());
  BITTERN_TRY(file.unchanged());
  return file;
}

Status TargetsFile::check_values() const {
  for (const std::int32_t id : ids_)
    if (id < 0 || id >= key_.vocab)
      return not_targets(path(), "token " + std::to_string(id) + " of a vocabulary of " +
                                     std::to_string(key_.vocab));
  const auto finite = [](std::span<const float> values) {
    return std::all_of(values.begin(), values.end(), [](float x) { return std::isfinite(x); });
  };
  if (!finite(log_p_) || !finite(tail_) || !finite(right_))
    return not_targets(path(), "holds a NaN or an infinity");
  return {};
}

Status TargetsFile::check(const TargetsKey& wanted) const {
  const auto differs = [&](const char* what, const std::string& own, const std::string& other) {
    return invalid(path() + ": made with " + what + " " + own + ", expected " + other);
  };
  if (key_.dialect != wanted.dialect) return differs("dialect", key_.dialect, wanted.dialect);
  for (const auto& [what, own, other] : {std::tuple("context", key_.context, wanted.context),
                                         std::tuple("first token", key_.first, wanted.first)})
    if (own != other) return differs(what, std::to_string(own), std::to_string(other));
  if (key_.tokens != wanted.tokens)
    return invalid(path() + ": made of other tokens, expected those of this text");
  if (key_.pieces != wanted.pieces)
    return invalid(path() + ": made of " + std::to_string(key_.pieces) + " pieces, expected " +
                   std::to_string(wanted.pieces));
  if (key_.positions != wanted.positions)
    return invalid(path() + ": holds " + std::to_string(key_.positions) + " positions, expected " +
                   std::to_string(wanted.positions));
  return {};
}

}  // namespace bittern
