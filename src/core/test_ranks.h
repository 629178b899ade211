// Processes for tests that are threads of one.
#pragma once
#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "bittern/ranks.h"

namespace bittern {

class ThreadRanks {
 public:
  // Calls f(ranks) on `count` threads. One that returns early makes the others' calls fail.
  template <class F>
  static void run(int count, const F& f) {
    Shared shared(count);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < count; ++rank)
      threads.emplace_back([&, rank] {
        One one(shared, rank);
        f(static_cast<Ranks&>(one));
        shared.leave();
      });
    for (std::thread& thread : threads) thread.join();
  }

 private:
  class Shared {
   public:
    explicit Shared(int count) : bytes(static_cast<std::size_t>(count)), count_(count) {}
    // Until all are here.
    Status meet() {
      std::unique_lock lock(mutex_);
      const std::uint64_t round = round_;
      if (++here_ == count_) {
        here_ = 0;
        ++round_;
        changed_.notify_all();
        return {};
      }
      changed_.wait(lock, [&] { return round_ != round || gone_ > 0; });
      return round_ != round ? Status() : unavailable("another process has ended");
    }
    void leave() {
      const std::lock_guard lock(mutex_);
      ++gone_;
      changed_.notify_all();
    }
    std::vector<std::span<const std::byte>> bytes;  // of each

   private:
    const int count_;
    std::mutex mutex_;
    std::condition_variable changed_;
    int here_ = 0, gone_ = 0;
    std::uint64_t round_ = 0;
  };

  class One : public Ranks {
   public:
    One(Shared& shared, int rank) : shared_(shared), rank_(rank) {}
    int rank() const noexcept override { return rank_; }
    int count() const noexcept override { return static_cast<int>(shared_.bytes.size()); }
    Status broadcast(std::span<std::byte> bytes) override {
      return exchange(bytes, [&] {
        if (rank_ > 0) std::copy_n(shared_.bytes[0].begin(), bytes.size(), bytes.begin());
      });
    }
    Status gather(std::span<const std::byte> own,
                  std::vector<std::vector<std::byte>>& all) override {
      return exchange(own, [&] {
        all.clear();
        for (const auto& bytes : shared_.bytes) all.emplace_back(bytes.begin(), bytes.end());
      });
    }
    Status collect(std::span<const std::byte> own,
                   std::vector<std::vector<std::byte>>& all) override {
      BITTERN_TRY(gather(own, all));
      if (rank_ > 0) all.clear();
      return {};
    }

   private:
    template <class F>
    Status exchange(std::span<const std::byte> own, const F& read) {
      shared_.bytes[static_cast<std::size_t>(rank_)] = own;
      BITTERN_TRY(shared_.meet());
      read();
      return shared_.meet();
    }
    Shared& shared_;
    const int rank_;
  };
};

}  // namespace bittern
