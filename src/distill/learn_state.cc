// LearnState on disk: a magic number, the fingerprint of what it belongs to, its numbers, and a
// checksum of all of that.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "distill/asked.h"
#include "distill/learner.h"
#include "formats/fingerprint.h"
#include "formats/mapped_file.h"

namespace bittern {
namespace {

constexpr std::uint64_t kMagic = 0x3265746174536c62;  // "blState2"

// Both directions with one list of fields.
struct Writer {
  std::vector<std::byte> bytes;
  template <class T>
  void number(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    const auto* const from = reinterpret_cast<const std::byte*>(&value);
    bytes.insert(bytes.end(), from, from + sizeof value);
  }
  template <class T>
  void list(const std::vector<T>& values) {
    number(std::uint64_t{values.size()});
    const auto from = std::as_bytes(std::span(values));
    bytes.insert(bytes.end(), from.begin(), from.end());
  }
};
struct Reader {
  std::span<const std::byte> bytes;
  bool ok = true;
  template <class T>
  void number(T& value) {
    ok = ok && bytes.size() >= sizeof value;
    if (!ok) return;
    std::memcpy(&value, bytes.data(), sizeof value);
    bytes = bytes.subspan(sizeof value);
  }
  template <class T>
  void list(std::vector<T>& values) {
    std::uint64_t count = 0;
    number(count);
    ok = ok && count <= bytes.size() / sizeof(T);
    if (!ok) return;
    values.resize(count);
    if (count > 0) std::memcpy(values.data(), bytes.data(), count * sizeof(T));
    bytes = bytes.subspan(count * sizeof(T));
  }
};

template <class State, class Stream>
void visit(State& s, Stream& stream) {
  stream.number(s.step);
  stream.number(s.rate);
  stream.number(s.start_kl);
  stream.number(s.best_kl);
  stream.number(s.best_step);
  stream.list(s.trials);
  stream.list(s.points);
  stream.number(s.train_sum);
  stream.number(s.train_count);
  for (auto* numbers : {&s.parameters, &s.means, &s.variances})
    for (auto& part : *numbers) stream.list(part);
  for (auto& part : s.best) stream.list(part);
  stream.list(s.best_codes);
}

}  // namespace

Status LearnState::write(const std::string& path, std::uint64_t fingerprint) const {
  Writer writer;
  writer.number(kMagic);
  writer.number(fingerprint);
  visit(*this, writer);
  writer.number(Checksum::of(writer.bytes));
  return write_whole(path, writer.bytes);
}

Result<LearnState> LearnState::read(const std::string& path, std::uint64_t fingerprint) {
  const auto file = MappedFile::open(path);
  if (!file) return file.status();
  const std::span<const std::byte> all = file->bytes();
  const auto damaged = [&] { return invalid(path + ": damaged, expected what a run wrote"); };
  constexpr std::size_t kSum = sizeof(std::uint64_t);
  if (all.size() < 3 * kSum) return damaged();
  std::uint64_t sum = 0;
  std::memcpy(&sum, all.data() + all.size() - kSum, kSum);
  Reader reader{.bytes = all.first(all.size() - kSum)};
  if (Checksum::of(reader.bytes) != sum) return damaged();
  std::uint64_t magic = 0, of = 0;
  reader.number(magic);
  reader.number(of);
  if (magic != kMagic) return damaged();
  if (of != fingerprint)
    return invalid(
        path + ": of a run with another teacher, text, start or options, expected the same ones");
  LearnState state;
  visit(state, reader);
  if (!reader.ok || !reader.bytes.empty()) return damaged();
  return state;
}

}  // namespace bittern
