#include "formats/safetensors.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "formats/json_events.h"
#include "formats/safetensors_layout.h"
#include "formats/test_files.h"

namespace bittern {
namespace {

namespace fs = std::filesystem;
using Bytes = std::vector<std::byte>;

std::string read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}
void save(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}
std::span<const std::byte> view(const std::string& text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}
std::string text(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::string u64(std::uint64_t n) {
  std::string s;
  for (int i = 0; i < 8; ++i) s += static_cast<char>(n >> (8 * i) & 255);
  return s;
}
// A file with this header and `data` zero bytes.
std::string file_of(const std::string& header, std::size_t data = 0) {
  return u64(header.size()) + header + std::string(data, '\0');
}

// safetensors 0.8.0 (PyPI) with numpy:
//   save({"b": np.array([[1, 2, 3]], np.uint8), "a\n\"\u00e9": np.array([1.5, -2], np.float32),
//         "c": np.array([7], np.int64), "h": np.array([1, 2], np.float16),
//         "none": np.zeros((0, 4), np.float32), "scalar": np.array(5, np.int32)},
//        {"format": "np"}).hex()
constexpr std::string_view kGolden =
    "78010000000000007b225f5f6d657461646174615f5f223a7b22666f726d6174223a226e70227d2c2263223a"
    "7b226474797065223a22493634222c227368617065223a5b315d2c22646174615f6f666673657473223a5b30"
    "2c385d7d2c22615c6e5c22c3a9223a7b226474797065223a22463332222c227368617065223a5b325d2c2264"
    "6174615f6f666673657473223a5b382c31365d7d2c226e6f6e65223a7b226474797065223a22463332222c22"
    "7368617065223a5b302c345d2c22646174615f6f666673657473223a5b31362c31365d7d2c227363616c6172"
    "223a7b226474797065223a22493332222c227368617065223a5b5d2c22646174615f6f666673657473223a5b"
    "31362c32305d7d2c2268223a7b226474797065223a22463136222c227368617065223a5b325d2c2264617461"
    "5f6f666673657473223a5b32302c32345d7d2c2262223a7b226474797065223a225538222c22736861706522"
    "3a5b312c335d2c22646174615f6f666673657473223a5b32342c32375d7d7d2007000000000000000000c03f"
    "000000c005000000003c0040010203";
constexpr const char* kAccented = "a\n\"\xc3\xa9";

std::string golden() {
  std::string s;
  const auto digit = [](char c) { return c <= '9' ? c - '0' : c - 'a' + 10; };
  for (std::size_t i = 0; i < kGolden.size(); i += 2)
    s += static_cast<char>(digit(kGolden[i]) * 16 + digit(kGolden[i + 1]));
  return s;
}
std::vector<SafetensorsSpec> golden_specs() {
  return {{"b", SafeDType::u8, {1, 3}},     {kAccented, SafeDType::f32, {2}},
          {"c", SafeDType::i64, {1}},       {"h", SafeDType::f16, {2}},
          {"none", SafeDType::f32, {0, 4}}, {"scalar", SafeDType::i32, {}}};
}

// ---- mapped_file ----

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
  const std::string says = " while it was being read, expected it to stay the same";
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

// ---- dtypes ----

TEST(Safetensors, DTypes) {
  for (int i = 0; i < kSafeDTypeCount; ++i) {
    const auto dtype = static_cast<SafeDType>(i);
    EXPECT_EQ(find_safe_dtype(name(dtype)), dtype);
    if (const auto ours = to_dtype(dtype)) {
      EXPECT_EQ(to_safe_dtype(*ours), dtype);
      EXPECT_EQ(size_of(*ours) * 8, static_cast<std::size_t>(bits_of(dtype)));
    }
  }
  EXPECT_EQ(to_dtype(SafeDType::i8), DType::s8);
  EXPECT_EQ(to_dtype(SafeDType::f8_e4m3), std::nullopt);
  EXPECT_EQ(find_safe_dtype("f32"), std::nullopt);
}

TEST(Safetensors, ReadsEveryDType) {
  const std::vector<std::pair<std::string, int>> sizes = {
      // bytes of four elements
      {"BOOL", 4}, {"F4", 2},      {"F6_E2M3", 3}, {"F6_E3M2", 3}, {"U8", 4},
      {"I8", 4},   {"F8_E5M2", 4}, {"F8_E4M3", 4}, {"F8_E8M0", 4}, {"F8_E4M3FNUZ", 4},
      {"I16", 8},  {"U16", 8},     {"F16", 8},     {"BF16", 8},    {"F8_E5M2FNUZ", 4},
      {"I32", 16}, {"U32", 16},    {"F32", 16},    {"C64", 32},    {"F64", 32},
      {"I64", 32}, {"U64", 32}};
  ASSERT_EQ(sizes.size(), static_cast<std::size_t>(kSafeDTypeCount));
  for (const auto& [dtype, size] : sizes) {
    const std::string file =
        file_of("{\"a\":{\"dtype\":\"" + dtype + "\",\"shape\":[2,2],\"data_offsets\":[0," +
                    std::to_string(size) + "]}}",
                static_cast<std::size_t>(size));
    const auto header = parse_safetensors("f", view(file));
    ASSERT_TRUE(header) << header.status().message();
    EXPECT_EQ(name(header->tensors[0].dtype), dtype);
  }
}

// ---- reading ----

TEST(Safetensors, ReadsWhatPythonWrote) {
  const TempFolder folder;
  folder.put("a.safetensors", golden());
  const auto file = SafetensorsFile::open(folder.path("a.safetensors"));
  ASSERT_TRUE(file) << file.status().message();
  EXPECT_EQ(file->metadata(), (SafetensorsMetadata{{"format", "np"}}));
  const std::vector<std::string> order = {"c", kAccented, "none", "scalar", "h", "b"};
  ASSERT_EQ(file->tensors().size(), order.size());
  for (std::size_t i = 0; i < order.size(); ++i) EXPECT_EQ(file->tensors()[i].name, order[i]);
  for (const SafetensorsSpec& spec : golden_specs()) {
    const SafetensorsTensor* tensor = file->find(spec.name);
    ASSERT_NE(tensor, nullptr) << spec.name;
    EXPECT_EQ(tensor->dtype, spec.dtype);
    EXPECT_EQ(tensor->shape, spec.shape);
  }
  EXPECT_EQ(text(file->bytes(*file->find("b"))), "\1\2\3");
  EXPECT_EQ(text(file->bytes(*file->find("c"))), u64(7));
  EXPECT_EQ(text(file->bytes(*file->find(kAccented))), std::string("\0\0\xc0?\0\0\0\xc0", 8));
  EXPECT_TRUE(file->bytes(*file->find("none")).empty());
  EXPECT_EQ(file->find("d"), nullptr);
  EXPECT_EQ(file->find(""), nullptr);
}

TEST(Safetensors, AcceptsWhatTheFormatAllows) {
  const auto ok = [](const std::string& header, std::size_t data = 0) {
    const std::string file = file_of(header, data);
    const auto result = parse_safetensors("f", view(file));
    EXPECT_TRUE(result) << result.status().message();
    return result;
  };
  EXPECT_TRUE(ok("{}")->tensors.empty());
  EXPECT_TRUE(ok("{}      ")->tensors.empty());
  EXPECT_TRUE(ok(R"({"__metadata__":null})")->metadata.empty());
  EXPECT_EQ(ok(R"({"__metadata__":{"b":"2","a":"1"}})")->metadata,
            (SafetensorsMetadata{{"a", "1"}, {"b", "2"}}));
  // Any order of tensors and fields; other fields are left alone.
  const auto header = ok(R"({"b":{"x":{"y":[1,{"z":[]}],"dtype":3},"data_offsets":[1,3],)"
                         R"("shape":[1],"dtype":"F16"},)"
                         R"("a":{"dtype":"U8","shape":[],"data_offsets":[0,1],"x":-1.5e3}})",
                         3);
  EXPECT_EQ(header->tensors[0].name, "a");
  EXPECT_EQ(header->tensors[1].begin + 2, header->tensors[1].end);
}

TEST(Safetensors, RefusesBadHeaders) {
  struct Case {
    std::string file, message;
  };
  const auto a = [](const std::string& fields, std::size_t data = 0) {
    return file_of("{\"a\":{" + fields + "}}", data);
  };
  const std::string nine = "1,1,1,1,1,1,1,1,1";
  const std::string deep(70, '[');
  const std::vector<Case> cases = {
      {"", "f: 0 bytes, expected at least 8"},
      {"1234567", "f: 7 bytes, expected at least 8"},
      {u64(3) + "{}", "f: header of 3 bytes, expected at most 2"},
      {u64(~std::uint64_t{0}) + "{}",
       "f: header of 18446744073709551615 bytes, expected at most 2"},
      {u64(0), "f: header: does not begin with '{', expected a JSON object"},
      {file_of(" {}"), "f: header: does not begin with '{', expected a JSON object"},
      {file_of("[]"), "f: header: does not begin with '{', expected a JSON object"},
      {file_of("{"), "f: header: not valid JSON at byte 2"},
      {file_of("{} x"), "f: header: not valid JSON at byte 4"},
      {file_of("{}{}"), "f: header: not valid JSON at byte 3"},
      {file_of(std::string("{}\0\0", 4)), "f: header: not valid JSON at byte 2: NUL"},
      {file_of("{\"\xff\":1}"), "f: header: not valid JSON at byte 3"},
      {file_of("{\"a\":{\"x\":1e999}}"), "f: header: not valid JSON at byte 15"},
      {file_of("{\"a\":{\"x\":" + deep), "f: header: nested more than 64 deep, expected less"},
      {file_of("{\"a\":1}"), "f: tensor \"a\": a number, expected an object"},
      {file_of("{\"a\":[]}"), "f: tensor \"a\": a list, expected an object"},
      {file_of("{\"a\":null}"), "f: tensor \"a\": null, expected an object"},
      {file_of("{\"__metadata__\":true}"), "f: __metadata__: a boolean, expected an object"},
      {file_of("{\"__metadata__\":[]}"), "f: __metadata__: a list, expected an object"},
      {file_of("{\"__metadata__\":{\"k\":1}}"), "f: __metadata__: \"k\": not a string"},
      {file_of("{\"__metadata__\":{\"k\":{}}}"), "f: __metadata__: \"k\": not a string"},
      {file_of("{\"__metadata__\":{},\"__metadata__\":{}}"),
       "f: __metadata__: given twice, expected once"},
      {file_of("{\"__metadata__\":{\"k\":\"1\",\"k\":\"2\"}}"),
       "f: __metadata__: \"k\": given twice, expected once"},
      {a(R"("dtype":"U8","shape":[0])"), "f: tensor \"a\": no data_offsets, expected one"},
      {a(R"("dtype":"U8","data_offsets":[0,0])"), "f: tensor \"a\": no shape, expected one"},
      {a(R"("shape":[0],"data_offsets":[0,0])"), "f: tensor \"a\": no dtype, expected one"},
      {a(R"("dtype":"U8","dtype":"U8")"), "f: tensor \"a\": dtype: given twice, expected once"},
      {a(R"("dtype":1)"), "f: tensor \"a\": dtype: not a string"},
      {a(R"("dtype":[])"), "f: tensor \"a\": dtype: not a string"},
      {a(R"("dtype":"F128")"),
       "f: tensor \"a\": dtype \"F128\", expected one of BOOL F4 F6_E2M3 F6_E3M2 U8 I8 F8_E5M2 "
       "F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ I16 U16 F16 BF16 I32 U32 F32 C64 F64 I64 U64"},
      {a(R"("shape":1)"), "f: tensor \"a\": shape: not a list of whole numbers >= 0"},
      {a(R"("shape":{})"), "f: tensor \"a\": shape: not a list of whole numbers >= 0"},
      {a(R"("shape":[[1]])"), "f: tensor \"a\": shape: not a list of whole numbers >= 0"},
      {a(R"("shape":[-1])"), "f: tensor \"a\": shape: not a list of whole numbers >= 0"},
      {a(R"("shape":[1.0])"), "f: tensor \"a\": shape: not a list of whole numbers >= 0"},
      {a(R"("shape":["1"])"), "f: tensor \"a\": shape: not a list of whole numbers >= 0"},
      {a(R"("shape":[18446744073709551616])"),
       "f: tensor \"a\": shape: not a list of whole numbers >= 0"},
      {a("\"shape\":[" + nine + "]"),
       "f: tensor \"a\": shape: more than 8 numbers, expected fewer"},
      {a("\"data_offsets\":[" + nine + "]"),
       "f: tensor \"a\": data_offsets: more than 8 numbers, expected fewer"},
      {a(R"("data_offsets":"0")"),
       "f: tensor \"a\": data_offsets: not a list of whole numbers >= 0"},
      {a(R"("dtype":"U8","shape":[0],"data_offsets":[0])"),
       "f: tensor \"a\": data_offsets [0], expected two numbers"},
      {a(R"("dtype":"U8","shape":[0],"data_offsets":[0,0,0])"),
       "f: tensor \"a\": data_offsets [0,0,0], expected two numbers"},
      {a(R"("dtype":"U8","shape":[1],"data_offsets":[1,0])", 1),
       "f: tensor \"a\": data_offsets [1,0], expected begin <= end"},
      {a(R"("dtype":"U8","shape":[2],"data_offsets":[0,2])", 1),
       "f: tensor \"a\": data_offsets [0,2], expected within the 1 bytes of data"},
      {a(R"("dtype":"U8","shape":[0],"data_offsets":[18446744073709551615,18446744073709551615])"),
       "f: tensor \"a\": data_offsets [18446744073709551615,18446744073709551615], expected within "
       "the 0 bytes of data"},
      {a(R"("dtype":"F32","shape":[1,2],"data_offsets":[0,4])", 4),
       "f: tensor \"a\": data_offsets [0,4], expected 8 bytes for shape [1,2] of F32"},
      {a(R"("dtype":"F32","shape":[4294967296,4294967296,4],"data_offsets":[0,0])"),
       "f: tensor \"a\": shape [4294967296,4294967296,4] of F32, expected less than 2^61 bytes"},
      {a(R"("dtype":"U8","shape":[0,9223372036854775807,9],"data_offsets":[0,0])"),
       "f: tensor \"a\": shape [0,9223372036854775807,9] of U8, expected less than 2^61 bytes"},
      {a(R"("dtype":"F4","shape":[3],"data_offsets":[0,2])", 2),
       "f: tensor \"a\": shape [3] of F4, expected whole bytes"},
      {a(R"("dtype":"U8","shape":[1],"data_offsets":[0,1])", 3),
       "f: 2 bytes at the end belong to no tensor, expected none"},
      {file_of("{}", 1), "f: 1 bytes at the end belong to no tensor, expected none"},
      {a(R"("dtype":"U8","shape":[1],"data_offsets":[2,3])", 3),
       "f: tensor \"a\": data_offsets [2,3] leave a hole of 2 bytes before it, expected none"},
      {file_of(R"({"b":{"dtype":"U8","shape":[3],"data_offsets":[1,4]},)"
               R"("a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})",
               4),
       "f: tensor \"b\": data_offsets [1,4] overlap tensor \"a\", expected none to"},
      {file_of(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
               R"("a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
               2),
       "f: tensor \"a\": given twice, expected once"},
      {file_of("{\"a\\u0000\\n\\\"\\\\" + std::string(200, 'x') + "\":1}"),
       "f: tensor \"a\\x00\\x0a\\\"\\\\" + std::string(115, 'x') +
           "...\": a number, expected an object"},
  };
  for (const Case& c : cases) {
    const auto result = parse_safetensors("f", view(c.file));
    EXPECT_FALSE(result) << c.message;
    EXPECT_EQ(result.status().message(), c.message);
    const bool dtype = c.message.find("F128") != std::string::npos;
    EXPECT_EQ(result.status().code(), dtype ? Code::unsupported : Code::invalid_argument);
  }
}

TEST(Safetensors, RefusesHugeHeaders) {
  const auto message = [](const std::string& file) {
    return std::string(parse_safetensors("f", view(file)).status().message());
  };
  EXPECT_EQ(message(u64(100'000'001) + std::string(100'000'001, ' ')),
            "f: header of 100000001 bytes, expected at most 100000000");
  EXPECT_EQ(message(file_of("{\"" + std::string(9 << 20, 'a') + "\":1}")),
            "f: header: no new string within 8388608 bytes of byte 1, expected one");
  EXPECT_EQ(message(file_of("{" + std::string(9 << 20, ' ') + "}")),
            "f: header: no new string within 8388608 bytes of byte 0, expected one");
  std::string many = "{\"__metadata__\":{";
  for (std::size_t i = 0; i <= kSafetensorsMaxMetadata; ++i) many += "\"a\":\"\",";
  EXPECT_EQ(message(file_of(many)), "f: __metadata__: more than 65536 entries, expected fewer");
  many = "{";
  const std::string longest(kSafetensorsMaxName, 'n');
  const auto named = [](const std::string& name) {
    return file_of("{\"" + name + R"(":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})");
  };
  EXPECT_EQ(message(named(longest)), "");
  EXPECT_EQ(message(named(longest + "n")),
            "f: tensor \"" + longest.substr(0, 120) +
                "...\": a name of 1025 bytes, expected at most 1024");
  for (std::size_t i = 0; i <= kSafetensorsMaxTensors; ++i)
    many += R"("":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},)";
  EXPECT_EQ(message(file_of(many)), "f: header: more than 524288 tensors, expected fewer");
}

// Each is read or refused in one line; under the sanitizers nothing else may happen.
TEST(Safetensors, SurvivesEveryCutAndEveryFlippedBit) {
  const std::string whole = golden();
  const auto survives = [](const std::string& file) {
    // A copy of its own, so that a byte read past the end is seen.
    const Bytes copy(view(file).begin(), view(file).end());
    const auto result = parse_safetensors("f", copy);
    if (result) {
      for (const SafetensorsTensor& t : result->tensors) EXPECT_LE(t.end, copy.size());
    } else {
      const std::string_view message = result.status().message();
      EXPECT_EQ(message.substr(0, 3), "f: ");
      EXPECT_EQ(message.find('\n'), std::string_view::npos);
    }
    return result.ok();
  };
  for (std::size_t size = 0; size < whole.size(); ++size)
    EXPECT_FALSE(survives(whole.substr(0, size))) << size;
  int fine = 0;
  for (std::size_t i = 0; i < whole.size(); ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string file = whole;
      file[i] = static_cast<char>(file[i] ^ (1 << bit));
      fine += survives(file);
    }
    for (const char c : {'\0', '"', '{', '}', '[', ']', ',', '9', '\xff'}) {
      std::string file = whole;
      file[i] = c;
      survives(file);
    }
  }
  EXPECT_GE(fine, 27 * 8);  // the data's own bits at least
}

// ---- folders ----

constexpr const char* kA = R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})";
constexpr const char* kBC = R"({"b":{"dtype":"U8","shape":[1],"data_offsets":[1,2]},)"
                            R"("c":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})";

TEST(SafetensorsFolder, OneFile) {
  const TempFolder folder;
  folder.put("model.safetensors", golden());
  const auto model = SafetensorsFolder::open(folder.path());
  ASSERT_TRUE(model) << model.status().message();
  EXPECT_EQ(model->size(), 6u);
  const auto b = model->find("b");
  ASSERT_TRUE(b);
  EXPECT_EQ(text(model->bytes(*b)), "\1\2\3");
  EXPECT_FALSE(model->find("bb"));
  EXPECT_EQ(model->unlisted(), 0u);
}

TEST(SafetensorsFolder, Shards) {
  const TempFolder folder;
  folder.put("y.safetensors", file_of(kA, 1));
  folder.put("x.safetensors", file_of(kBC, 2));
  folder.put(
      "model.safetensors.index.json",
      R"({"metadata":{"total_size":2},"weight_map":{"c":"x.safetensors","a":"y.safetensors"}})");
  const auto model = SafetensorsFolder::open(folder.path() + "/");
  ASSERT_TRUE(model) << model.status().message();
  ASSERT_EQ(model->files().size(), 2u);
  ASSERT_EQ(model->size(), 2u);
  EXPECT_EQ(model->tensor(0).name, "c");
  EXPECT_EQ(model->tensor(1).name, "a");
  EXPECT_EQ(model->file(1).path(), folder.path("y.safetensors"));
  EXPECT_EQ(model->find("a"), 1u);
  EXPECT_EQ(model->find("c"), 0u);
  EXPECT_FALSE(model->find("b"));
  EXPECT_EQ(model->unlisted(), 1u);
}

TEST(SafetensorsFolder, Refuses) {
  const TempFolder folder;
  const auto message = [&](const std::string& index) {
    folder.put("model.safetensors.index.json", index);
    return std::string(SafetensorsFolder::open(folder.path()).status().message());
  };
  const std::string index = folder.path("model.safetensors.index.json: ");
  EXPECT_EQ(
      SafetensorsFolder::open(folder.path()).status().message(),
      folder.path() + ": neither model.safetensors.index.json nor model.safetensors, expected one");
  folder.put("a.safetensors", file_of(kA, 1));
  folder.put("bad.safetensors", file_of(kA, 2));
  EXPECT_EQ(message(""), index + "empty, expected at least one byte");
  EXPECT_EQ(message("{"), index + "not valid JSON at byte 2");
  EXPECT_EQ(message("[]"), index + "a list, expected an object");
  EXPECT_EQ(message("1"), index + "a number, expected an object");
  EXPECT_EQ(message("{}"), index + "no weight_map with a tensor, expected one");
  EXPECT_EQ(message(R"({"weight_map":{}})"), index + "no weight_map with a tensor, expected one");
  EXPECT_EQ(message(R"({"weight_map":[]})"), index + "weight_map: a list, expected an object");
  EXPECT_EQ(message(R"({"weight_map":null})"), index + "weight_map: null, expected an object");
  EXPECT_EQ(message(R"({"weight_map":{"a":"a.safetensors"},"weight_map":{}})"),
            index + "weight_map: given twice, expected once");
  EXPECT_EQ(message(R"({"weight_map":{"a":1}})"),
            index + "tensor \"a\": shard: not a string, expected a file's name");
  EXPECT_EQ(message(R"({"weight_map":{"a":["a.safetensors"]}})"),
            index + "tensor \"a\": shard: not a string, expected a file's name");
  EXPECT_EQ(message(R"({"weight_map":{"a":"a.safetensors","a":"a.safetensors"}})"),
            index + "tensor \"a\": given twice, expected once");
  for (const std::string shard : {"", ".", "..", "../a.safetensors", "/etc/passwd", "x/y",
                                  "..\\\\a", "a.safetensors\\u0000"}) {
    const std::string text = message(R"({"weight_map":{"a":")" + shard + "\"}}");
    EXPECT_EQ(text.find(index + "tensor \"a\": shard \""), 0u) << text;
    EXPECT_NE(text.find("\", expected the name of a file beside the index"), std::string::npos);
  }
  EXPECT_EQ(message(R"({"weight_map":{"a":"b.safetensors"}})"),
            folder.path("b.safetensors: no such file or folder, expected a shard named by "
                        "model.safetensors.index.json"));
  EXPECT_EQ(message(R"({"weight_map":{"b":"a.safetensors"}})"),
            index + "tensor \"b\": not in \"a.safetensors\", expected there");
  EXPECT_EQ(message(R"({"weight_map":{"a":"bad.safetensors"}})"),
            folder.path("bad.safetensors: 1 bytes at the end belong to no tensor, expected none"));
  std::string many = "{\"weight_map\":{";
  const std::string name(kSafetensorsMaxName + 1, 'n');
  EXPECT_EQ(message(R"({"weight_map":{")" + name + R"(":"x.safetensors"}})"),
            index + "tensor \"" + name.substr(0, 120) +
                "...\": a name of 1025 bytes, expected at most 1024");
  for (std::size_t i = 0; i <= kSafetensorsMaxShards; ++i)
    many += "\"\":\"" + std::to_string(i) + "\",";
  EXPECT_EQ(message(many), index + "weight_map: more than 16384 shards, expected fewer");
}

TEST(SafetensorsFolder, IndexSurvivesEveryCutAndEveryFlippedBit) {
  const std::string whole =
      R"({"metadata":{"total_size":2},"weight_map":{"c":"x.safetensors","a":"y.safetensors"}})";
  for (std::size_t i = 0; i < whole.size(); ++i) {
    EXPECT_FALSE(parse_safetensors_index("f", view(whole.substr(0, i))));
    for (int bit = 0; bit < 8; ++bit) {
      std::string text = whole;
      text[i] = static_cast<char>(text[i] ^ (1 << bit));
      const auto result = parse_safetensors_index("f", view(text));
      if (!result) {
        EXPECT_EQ(result.status().message().find("f: "), 0u);
      }
    }
  }
}

// ---- writing ----

// The golden's tensors, in its order of specs.
std::vector<std::string> golden_data() {
  return {"\1\2\3", std::string("\0\0\xc0?\0\0\0\xc0", 8),
          u64(7),   std::string("\0<\0@", 4),
          "",       std::string("\5\0\0\0", 4)};
}

// All in one file.
Result<OutputLayout> one_file(const std::vector<SafetensorsSpec>& specs,
                              SafetensorsMetadata metadata = {}) {
  return lay_out_safetensors("f", specs, ~std::uint64_t{0}, std::move(metadata));
}

TEST(SafetensorsLayout, LaysOutAsPythonDoes) {
  const auto layout = one_file(golden_specs(), {{"format", "np"}});
  ASSERT_TRUE(layout) << layout.status().message();
  EXPECT_EQ(file_text(*layout, golden_data()), golden());
}

TEST(SafetensorsLayout, NothingAtAll) {
  const TempFolder folder;
  const auto layout = one_file({});
  ASSERT_TRUE(layout);
  folder.put("a", file_text(*layout, {}));
  EXPECT_EQ(folder.text_of("a"), file_of("{}      "));
  EXPECT_TRUE(SafetensorsFile::open(folder.path("a")));
}

TEST(SafetensorsLayout, EveryDTypeRoundTrips) {
  const TempFolder folder;
  std::vector<SafetensorsSpec> specs;
  for (int i = 0; i < kSafeDTypeCount; ++i)
    specs.push_back({"t" + std::to_string(i), static_cast<SafeDType>(i), {3, 4}});
  std::vector<std::string> data;
  for (std::size_t i = 0; i < specs.size(); ++i) {
    data.emplace_back(static_cast<std::size_t>(bits_of(specs[i].dtype)) * 12 / 8,
                      static_cast<char>(i + 1));
  }
  const auto layout = one_file(specs);
  ASSERT_TRUE(layout);
  folder.put("a", file_text(*layout, data));
  const auto file = SafetensorsFile::open(folder.path("a"));
  ASSERT_TRUE(file) << file.status().message();
  for (std::size_t i = 0; i < specs.size(); ++i) {
    const SafetensorsTensor* tensor = file->find(specs[i].name);
    ASSERT_NE(tensor, nullptr);
    EXPECT_EQ(tensor->dtype, specs[i].dtype);
    EXPECT_EQ(tensor->shape, specs[i].shape);
    EXPECT_EQ(text(file->bytes(*tensor)), data[i]);
    EXPECT_EQ(tensor->begin % static_cast<std::uint64_t>(std::max(bits_of(tensor->dtype) / 8, 1)),
              0u);
  }
}

TEST(SafetensorsLayout, ShardsAndIndex) {
  const TempFolder folder;
  const std::vector<SafetensorsSpec> specs = {{"d", SafeDType::u8, {4}},
                                              {"c", SafeDType::f32, {1}},
                                              {"big", SafeDType::u8, {20}},
                                              {"none", SafeDType::u8, {0}},
                                              {"a", SafeDType::u8, {5}}};
  std::vector<std::string> data;
  for (std::size_t i = 0; i < specs.size(); ++i)
    data.emplace_back(specs[i].shape[0] * (i == 1 ? 4 : 1), static_cast<char>('0' + i));
  const auto layout = lay_out_safetensors(folder.path(), specs, 8, {{"format", "pt"}});
  ASSERT_TRUE(layout) << layout.status().message();
  for (std::uint32_t i = 0; i < layout->files.size(); ++i)
    folder.put(layout->files[i].name, file_text(*layout, data, i));
  const std::string metadata[] = {"\"total_size\": 33"};
  const auto index = safetensors_index(folder.path(), specs, *layout, metadata);
  ASSERT_TRUE(index) << index.status().message();
  folder.put("model.safetensors.index.json", *index);
  EXPECT_EQ(folder.names(), (std::vector<std::string>{
                                "model-00001-of-00003.safetensors",
                                "model-00002-of-00003.safetensors",
                                "model-00003-of-00003.safetensors",
                                "model.safetensors.index.json",
                            }));
  EXPECT_EQ(folder.text_of("model.safetensors.index.json"), R"({
  "metadata": {
    "total_size": 33
  },
  "weight_map": {
    "a": "model-00003-of-00003.safetensors",
    "big": "model-00002-of-00003.safetensors",
    "c": "model-00001-of-00003.safetensors",
    "d": "model-00001-of-00003.safetensors",
    "none": "model-00003-of-00003.safetensors"
  }
}
)");
  const auto model = SafetensorsFolder::open(folder.path());
  ASSERT_TRUE(model) << model.status().message();
  EXPECT_EQ(model->size(), 5u);
  EXPECT_EQ(text(model->bytes(*model->find("c"))), "1111");
  EXPECT_EQ(text(model->bytes(*model->find("a"))), "44444");
  for (const SafetensorsFile& file : model->files())
    EXPECT_EQ(file.metadata(), (SafetensorsMetadata{{"format", "pt"}}));
}

TEST(SafetensorsLayout, Refuses) {
  // Sizes are checked before it is known which file a tensor goes to.
  const std::string folder = "f", path = "f/model.safetensors";
  const auto message = [&](const std::vector<SafetensorsSpec>& specs,
                           SafetensorsMetadata metadata = {}) {
    return std::string(one_file(specs, std::move(metadata)).status().message());
  };
  const std::uint64_t big = std::uint64_t{1} << 60;
  EXPECT_EQ(message({{"x", SafeDType::u8, {1}}, {"x", SafeDType::u8, {2}}}),
            path + ": tensor \"x\": given twice, expected once");
  EXPECT_EQ(message({{"__metadata__", SafeDType::u8, {1}}}),
            path + ": tensor \"__metadata__\": reserved, expected another name");
  EXPECT_EQ(message({{"\xff", SafeDType::u8, {1}}}),
            path + ": tensor \"\xff\": not UTF-8, expected another name");
  EXPECT_EQ(message({{"x", SafeDType::f4, {1}}}),
            folder + ": tensor \"x\": shape [1] of F4, expected whole bytes");
  const std::string longest(kSafetensorsMaxName, 'n');
  EXPECT_EQ(message({{longest + "n", SafeDType::u8, {1}}}),
            path + ": tensor \"" + longest.substr(0, 120) +
                "...\": a name of 1025 bytes, expected at most 1024");
  EXPECT_EQ(message({{"x", SafeDType::u8, std::vector<std::uint64_t>(9, 1)}}),
            folder + ": tensor \"x\": rank 9, expected at most 8");
  EXPECT_EQ(message({{"x", SafeDType::f64, {big}}}),
            folder +
                ": tensor \"x\": shape [1152921504606846976] of F64, expected less than 2^61 "
                "bytes");
  EXPECT_EQ(message({{"x", SafeDType::u8, {big}}, {"y", SafeDType::u8, {big}}}),
            folder + ": 2^61 bytes or more, expected less");
  EXPECT_EQ(message({}, {{"k", "\xff"}}),
            path + ": __metadata__: \"k\": not UTF-8, expected UTF-8");
  EXPECT_EQ(message({}, {{"k", "1"}, {"k", "2"}}),
            path + ": __metadata__: \"k\": given twice, expected once");
  EXPECT_EQ(lay_out_safetensors(folder, {}, 0).status().message(),
            folder + ": shards of 0 bytes, expected at least 1");
  std::vector<SafetensorsSpec> many;
  for (int i = 0; i < 16385; ++i) many.push_back({std::to_string(i), SafeDType::u8, {1}});
  EXPECT_EQ(lay_out_safetensors(folder, many, 1).status().message(),
            folder + ": 16385 shards, expected at most 16384");
}

}  // namespace
}  // namespace bittern
