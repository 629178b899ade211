// LearnState on disk: a magic number, the fingerprint of what it belongs to, its numbers, and a
// checksum of all of that.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "convert/replace.h"
#include "core/packer.h"
#include "distill/learner.h"
#include "formats/fingerprint.h"
#include "formats/mapped_file.h"

namespace bittern {
namespace {

constexpr std::uint64_t kMagic = 0x3265746174536c62;  // "blState2"

// The fields, in both directions.
template <class State, class F>
void visit(State& s, const F& f) {
  f(s.step);
  f(s.rate);
  f(s.start_kl);
  f(s.best_kl);
  f(s.best_step);
  f(s.trials);
  f(s.points);
  f(s.train_sum);
  f(s.train_count);
  for (auto* numbers : {&s.parameters, &s.means, &s.variances})
    for (auto& part : *numbers) f(part);
  for (auto& part : s.best) f(part);
  f(s.best_codes);
}

// What a Packer would pack, and then its sum, without a copy of it all in memory.
class SummedFile {
 public:
  explicit SummedFile(WritableFile& file) : file_(file) { room_.reserve(kRoom); }
  template <class T>
  void add(const T& value) {
    append(std::as_bytes(std::span(&value, 1)));
  }
  template <class T>
  void add(const std::vector<T>& values) {
    add(values.size());
    append(std::as_bytes(std::span(values)));
  }
  Status end() {
    flush();
    const std::uint64_t sum = sum_.value();
    append(std::as_bytes(std::span(&sum, 1)));
    flush();
    return status_;
  }

 private:
  static constexpr std::size_t kRoom = std::size_t{1} << 20;  // whole blocks of the sum
  void append(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const auto some = bytes.first(std::min(bytes.size(), kRoom - room_.size()));
      room_.insert(room_.end(), some.begin(), some.end());
      bytes = bytes.subspan(some.size());
      if (room_.size() == kRoom) flush();
    }
  }
  void flush() {
    if (status_.ok()) status_ = file_.pwrite(at_, room_);
    sum_.add(room_);
    at_ += room_.size();
    room_.clear();
  }

  WritableFile& file_;
  Checksum sum_;
  std::vector<std::byte> room_;
  std::uint64_t at_ = 0;
  Status status_;
};

}  // namespace

Status LearnState::write(const std::string& path, std::uint64_t fingerprint) const {
  return write_whole(path, [&](WritableFile& file) {
    SummedFile out(file);
    out.add(kMagic);
    out.add(fingerprint);
    visit(*this, [&](const auto& field) { out.add(field); });
    return out.end();
  });
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
  const std::span<const std::byte> summed = all.first(all.size() - kSum);
  if (Checksum::of(summed) != sum) return damaged();
  Unpacker unpacker(summed);
  if (unpacker.next<std::uint64_t>() != kMagic) return damaged();
  if (unpacker.next<std::uint64_t>() != fingerprint)
    return invalid(
        path + ": of a run with another teacher, text, start or options, expected the same ones");
  LearnState state;
  visit(state, [&](auto& field) { unpacker.take(field); });
  if (!unpacker.ok() || !unpacker.empty()) return damaged();
  return state;
}

}  // namespace bittern
