#include "formats/mapped_file.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "bittern/convert.h"
#include "formats/safetensors_test.h"

namespace bittern {
namespace {

using namespace safetensors_bytes;

namespace fs = std::filesystem;

using Bytes = std::vector<std::byte>;

std::string read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}
void save(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

TEST(MappedFile, MapsAFile) {
  const TempFolder folder;
  folder.put("a", "hello");
  auto file = MappedFile::open(folder.path("a"));
  ASSERT_TRUE(file) << file.status().message();
  EXPECT_EQ(text(file->bytes()), "hello");
  EXPECT_EQ(file->path(), folder.path("a"));
  MappedFile moved = std::move(*file);
  EXPECT_EQ(text(moved.bytes()), "hello");
  folder.put("b", "other");
  auto other = MappedFile::open(folder.path("b"));
  ASSERT_TRUE(other);
  moved = std::move(*other);
  EXPECT_EQ(text(moved.bytes()), "other");
}

TEST(MappedFile, RefusesWhatIsNoFile) {
  const TempFolder folder;
  folder.put("empty", "");
  ASSERT_EQ(::mkfifo((folder.path("pipe")).c_str(), 0600), 0);
  const auto message = [](const std::string& path) {
    return std::string(MappedFile::open(path).status().message());
  };
  EXPECT_EQ(message(folder.path("none")), folder.path("none: no such file or folder"));
  EXPECT_EQ(MappedFile::open(folder.path("none")).status().code(), Code::unavailable);
  EXPECT_EQ(message(folder.path("empty")), folder.path("empty: empty, expected at least one byte"));
  EXPECT_EQ(message(folder.path()), folder.path() + ": a folder, expected a file");
  EXPECT_EQ(message(folder.path("pipe")),
            folder.path("pipe: a device, pipe or socket, expected a file"));
  EXPECT_EQ(message(folder.path("empty/x")), folder.path("empty/x: cannot open: Not a directory"));
}

constexpr std::size_t kPage = 4096;

TEST(MappedFile, SaysThatTheFileChanged) {
  const TempFolder folder;
  const auto after = [&](auto&& change) {
    folder.put("a", std::string(3 * kPage, 'a'));
    const auto file = MappedFile::open(folder.path("a"));
    EXPECT_TRUE(file && file->unchanged().ok());
    change(folder.path("a"));
    return std::string(file->unchanged().message());
  };
  const std::string says = " while bittern was reading it; it must not change during a run";
  EXPECT_EQ(after([](const std::string& path) { fs::resize_file(path, 5); }),
            folder.path("a: shrank from 12288 to 5 bytes") + says);
  EXPECT_EQ(after([](const std::string& path) { fs::resize_file(path, 20000); }),
            folder.path("a: grew from 12288 to 20000 bytes") + says);
  EXPECT_EQ(after([](const std::string& path) {
              fs::last_write_time(path, fs::last_write_time(path) + std::chrono::seconds(1));
            }),
            folder.path("a: was written to") + says);
  EXPECT_EQ(after([](const std::string& path) {
              fs::copy(path, path + "2");
              fs::rename(path + "2", path);
            }),
            folder.path("a: was replaced") + says);
  EXPECT_EQ(after([](const std::string& path) { fs::remove(path); }),
            folder.path("a: was removed") + says);
}

// What the handler of SIGBUS does is tried in a process of its own. Returns its exit status, or
// minus the signal that ended it.
template <class F>
int in_child(F&& f) {
  const pid_t child = ::fork();
  if (child == 0) {
    struct sigaction plain = {};
    plain.sa_handler = SIG_DFL;  // not a sanitizer's
    ::sigaction(SIGBUS, &plain, nullptr);
    ::_exit(f());
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

char last_byte_after_shrinking(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDWR);
  void* data = ::mmap(nullptr, 3 * kPage, PROT_READ, MAP_PRIVATE, fd, 0);
  if (data == MAP_FAILED || ::ftruncate(fd, kPage) != 0) ::_exit(99);
  return static_cast<volatile const char*>(data)[3 * kPage - 1];
}

TEST(MappedFile, AGuardedProcessOutlivesAFileThatShrinks) {
  const TempFolder folder;
  folder.put("a", std::string(3 * kPage, 'a'));
  folder.put("b", std::string(3 * kPage, 'b'));
  EXPECT_EQ(in_child([&] {
              guard_mapped_files();
              for (int i = 0; i < 3; ++i) {  // regions serve again
                folder.put("a", std::string(3 * kPage, 'a'));
                auto closed = MappedFile::open(folder.path("b"));
                auto file = MappedFile::open(folder.path("a"));
                const auto other = MappedFile::open(folder.path("b"));
                {
                  const auto gone = std::move(*closed);
                }
                const MappedFile moved = std::move(*file);
                fs::resize_file(folder.path("a"), kPage);
                std::size_t zeros = 0;
                for (const std::byte x : moved.bytes()) zeros += x == std::byte{0};
                if (zeros != 2 * kPage) return 1;
                fs::resize_file(folder.path("a"), 3 * kPage);  // what was lost stays lost
                if (moved.unchanged().ok() || !other->unchanged().ok()) return 2;
                if (text(other->bytes()) != std::string(3 * kPage, 'b')) return 3;
              }
              return 0;
            }),
            0);
}

TEST(MappedFile, FaultsOfOthersGoWhereTheyWent) {
  const TempFolder folder;
  folder.put("a", std::string(3 * kPage, 'a'));
  const auto fault = [&] {
    guard_mapped_files();
    return static_cast<int>(last_byte_after_shrinking(folder.path("a")));
  };
  EXPECT_EQ(in_child(fault), -SIGBUS);
  EXPECT_EQ(in_child([] {
              guard_mapped_files();
              return ::raise(SIGBUS);
            }),
            -SIGBUS);
  folder.put("a", std::string(3 * kPage, 'a'));
  EXPECT_EQ(in_child([&] {
              struct sigaction theirs = {};
              theirs.sa_handler = [](int) { ::_exit(42); };
              ::sigaction(SIGBUS, &theirs, nullptr);
              return fault();
            }),
            42);
}

TEST(WritableFile, WritesAnywhere) {
  const TempFolder folder;
  auto file = WritableFile::open(folder.path("a"), true);
  ASSERT_TRUE(file) << file.status().message();
  EXPECT_TRUE(file->pwrite(0, view("hello ")).ok());
  EXPECT_TRUE(file->pwrite(6, view("world")).ok());
  EXPECT_TRUE(file->pwrite(0, view("J")).ok());
  EXPECT_EQ(file->size(), 11u);
  WritableFile moved = std::move(*file);
  EXPECT_TRUE(moved.sync().ok());
  EXPECT_EQ(folder.text_of("a"), "Jello world");
  EXPECT_TRUE(sync_name(folder.path("a")).ok());
  EXPECT_EQ(WritableFile::open(folder.path(), true).status().message(),
            folder.path() + ": a folder, expected a file");
  EXPECT_EQ(WritableFile::open(folder.path("no/a"), true).status().message(),
            folder.path("no/a: no such file or folder"));
}

TEST(WritableFile, TellsAStaleFileFromOneInWork) {
  const TempFolder folder;
  folder.put("a", "a longer stale text");
  auto file = WritableFile::open(folder.path("a"), true);
  ASSERT_TRUE(file) << file.status().message();
  EXPECT_EQ(WritableFile::open(folder.path("a"), true).status().message(),
            folder.path("a: being written by another process, expected none"));
  EXPECT_TRUE(file->pwrite(0, view("new")).ok());
  file->close();
  EXPECT_EQ(folder.text_of("a"), "new");
  // A link would lead the bytes elsewhere.
  fs::create_symlink(folder.path("a"), folder.path("b"));
  EXPECT_EQ(WritableFile::open(folder.path("b"), true).status().message(),
            folder.path("b: a symbolic link, expected a file"));
  fs::create_hard_link(folder.path("a"), folder.path("c"));
  EXPECT_EQ(WritableFile::open(folder.path("c"), true).status().message(),
            folder.path("c: a file with 2 names (hard links), expected one"));
  EXPECT_EQ(folder.text_of("a"), "new");
}

TEST(WritableFile, ADiskWithoutRoom) {
  const TempFolder folder;
  auto file = WritableFile::open(folder.path("a"), true);
  ASSERT_TRUE(file);
  EXPECT_TRUE(file->check_room(1).ok());
  const Status status = file->check_room(std::uint64_t{1} << 62);
  EXPECT_EQ(status.code(), Code::io_error);
  EXPECT_EQ(status.message().find(folder.path("a: disk has room for ")), 0u);
  EXPECT_NE(status.message().find(" bytes, expected 4611686018427387904"), std::string::npos);
  EXPECT_EQ(file->pwrite(~std::uint64_t{0}, view("x")).message(),
            folder.path("a: offset 18446744073709551615, expected less than 2^63"));
}

// On a file system of 64 KiB, which only a process with a mount namespace of its own can have.
TEST(WritableFile, AFullDisk) {
  const TempFolder folder;
  constexpr int kSkipped = 77;
  const pid_t child = ::fork();
  if (child == 0) {
    // Files there need an owner, so the user is mapped.
    const std::string user = "0 " + std::to_string(::getuid()) + " 1";
    const std::string group = "0 " + std::to_string(::getgid()) + " 1";
    if (::unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) ::_exit(kSkipped);
    save("/proc/self/setgroups", "deny");
    save("/proc/self/uid_map", user);
    save("/proc/self/gid_map", group);
    if (read("/proc/self/uid_map").empty() ||
        ::mount("tmpfs", folder.path().c_str(), "tmpfs", 0, "size=64k") != 0) {
      ::_exit(kSkipped);
    }
    auto file = WritableFile::open(folder.path("a"), true);
    const Bytes block(40000);
    bool good = file.ok() && file->pwrite(0, block).ok();
    const Status full = good ? file->pwrite(block.size(), block) : Status();
    good =
        full.code() == Code::io_error &&
        full.message() == folder.path("a: disk full at byte 65536, expected room for 14464 more");
    ::_exit(good ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  if (WEXITSTATUS(status) == kSkipped) GTEST_SKIP() << "may not mount a small file system here";
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

}  // namespace
}  // namespace bittern
