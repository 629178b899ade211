// The plug-in libbittern_mpi.so: Processes over MPI.
#define OMPI_SKIP_MPICXX
#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <string_view>

#include "bittern/version.h"
#include "cli/processes.h"

namespace bittern::cli {
namespace {

constexpr std::size_t kMost = std::size_t{1} << 30;  // MPI counts in ints

// f(part, its bytes) for parts of what is too large for a count of MPI.
template <class Byte, class F>
void in_parts(std::span<Byte> bytes, const F& f) {
  for (std::size_t first = 0; first < bytes.size(); first += kMost) {
    const std::size_t count = std::min(kMost, bytes.size() - first);
    f(bytes.data() + first, static_cast<int>(count));
  }
}

// What every process tells first: how many bytes it has, and the first of them, which most often
// are all.
struct Head {
  std::uint64_t size = 0;
  std::byte bytes[248]{};
};
template <class Bytes>
auto behind_head(Bytes& all) {
  const std::span bytes(all);
  return bytes.subspan(std::min(bytes.size(), sizeof Head::bytes));
}

// MPI's own errors end all processes, as it does by default: calls below cannot fail.
class MpiRanks : public Processes {
 public:
  MpiRanks() {
    // It would give its core away at each question, and get it back late on a busy machine.
    setenv("OMPI_MCA_mpi_yield_when_idle", "0", 0);
    int level = 0;
    MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    MPI_Comm_size(MPI_COMM_WORLD, &count_);
    MPI_Comm machine;
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank_, MPI_INFO_NULL, &machine);
    MPI_Comm_size(machine, &here_);
    MPI_Comm_free(&machine);
  }
  int rank() const noexcept override { return rank_; }
  int count() const noexcept override { return count_; }
  int here() const noexcept override { return here_; }
  void finish() noexcept override { MPI_Finalize(); }
  void abort(int status) noexcept override { MPI_Abort(MPI_COMM_WORLD, status); }

  Status broadcast(std::span<std::byte> bytes) override {
    return or_abort([&] {
      meet({});
      Requests requests;
      send_to_all(bytes, 0, requests);
      wait(requests, kShortest);
    });
  }
  Status gather(std::span<const std::byte> own, std::vector<std::vector<std::byte>>& all) override {
    return or_abort([&] {
      take_heads(meet(own), own, all);
      Requests requests;
      for (int from = 0; from < count_; ++from)
        send_to_all(behind_head(all[at(from)]), from, requests);
      wait(requests, kShortest);
    });
  }
  Status collect(std::span<const std::byte> own,
                 std::vector<std::vector<std::byte>>& all) override {
    return or_abort([&] {
      const std::vector<Head> heads = meet(own);
      all.clear();
      Requests requests;
      if (rank_ > 0) {
        in_parts(behind_head(own), [&](const std::byte* part, int count) {
          MPI_Isend(part, count, MPI_BYTE, 0, 0, MPI_COMM_WORLD, &requests.emplace_back());
        });
      } else {
        take_heads(heads, own, all);
        for (int from = 1; from < count_; ++from)
          in_parts(behind_head(all[at(from)]), [&](std::byte* part, int count) {
            MPI_Irecv(part, count, MPI_BYTE, from, 0, MPI_COMM_WORLD, &requests.emplace_back());
          });
      }
      wait(requests, kShortest);
    });
  }

 private:
  using Requests = std::vector<MPI_Request>;
  static constexpr unsigned kShortest = 20, kLongest = 1000;  // microseconds

  // In the middle of an exchange the others cannot be told what is wrong here: they would wait.
  template <class F>
  Status or_abort(const F& exchange) {
    try {
      exchange();
    } catch (const std::bad_alloc&) {
      std::fputs("bittern: out of memory for what processes send each other\n", stderr);
      abort(1);
    }
    return {};
  }

  static std::size_t at(int i) { return static_cast<std::size_t>(i); }

  // MPI's own functions wait in a loop that takes a core, which others may need. This one sleeps,
  // up to `most` microseconds at a time.
  static void wait(Requests& requests, unsigned most) {
    for (unsigned tries = 0;; ++tries) {
      int done = 0;
      MPI_Testall(static_cast<int>(requests.size()), requests.data(), &done, MPI_STATUSES_IGNORE);
      if (done != 0) return;
      if (tries > 100) usleep(std::min(tries, most));
    }
  }
  static void send_to_all(std::span<std::byte> bytes, int from, Requests& requests) {
    in_parts(bytes, [&](std::byte* part, int count) {
      MPI_Ibcast(part, count, MPI_BYTE, from, MPI_COMM_WORLD, &requests.emplace_back());
    });
  }
  // Until all are here: the others may have long to do yet.
  std::vector<Head> meet(std::span<const std::byte> bytes) const {
    Head own{.size = bytes.size()};
    std::copy_n(bytes.begin(), std::min(bytes.size(), sizeof own.bytes), own.bytes);
    std::vector<Head> all(at(count_));
    Requests requests(1);
    MPI_Iallgather(&own, sizeof own, MPI_BYTE, all.data(), sizeof own, MPI_BYTE, MPI_COMM_WORLD,
                   requests.data());
    wait(requests, kLongest);
    return all;
  }
  // Room for the bytes of all; this one's, and the heads of the others.
  void take_heads(const std::vector<Head>& heads, std::span<const std::byte> own,
                  std::vector<std::vector<std::byte>>& all) const {
    all.resize(heads.size());
    for (std::size_t i = 0; i < heads.size(); ++i) {
      all[i].resize(heads[i].size);
      std::copy_n(heads[i].bytes, std::min(all[i].size(), sizeof heads[i].bytes), all[i].begin());
    }
    std::copy(own.begin(), own.end(), all[at(rank_)].begin());
  }

  int rank_ = 0, count_ = 1, here_ = 1;
};

}  // namespace
}  // namespace bittern::cli

extern "C" __attribute__((visibility("default"))) bittern::cli::Processes* bittern_mpi_start(
    const char* version) {
  if (std::string_view(version) != bittern::version()) return nullptr;
  static bittern::cli::MpiRanks ranks;
  return &ranks;
}
