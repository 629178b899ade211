#include "core/ranks.h"

#include <string>

#include "core/guarded.h"

namespace bittern {
namespace {

// What a process has that others need not have: files, memory, a disk.
bool of_the_machine(Code code) {
  return code == Code::unavailable || code == Code::out_of_memory || code == Code::io_error ||
         code == Code::device_error || code == Code::internal;
}

}  // namespace

Status Ranks::agree(const Status& own) noexcept {
  if (!ended_.ok()) return own.ok() ? ended_ : own;
  ended_ = guarded("ranks", [&]() -> Status {
    Packer packer;
    packer.add(own.code());
    packer.add(std::vector<char>(own.message().begin(), own.message().end()));
    std::vector<std::vector<std::byte>> all;
    BITTERN_TRY(gather(packer.bytes(), all));
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      Unpacker unpacker(all[rank]);
      const Code code = unpacker.next<Code>();
      if (code == Code::ok) continue;
      const auto text = unpacker.next<std::vector<char>>();
      std::string message(text.begin(), text.end());
      if (rank > 0 && of_the_machine(code))
        message = "process " + std::to_string(rank) + ": " + message;
      return {code, message};
    }
    return {};
  });
  return ended_;
}

}  // namespace bittern
