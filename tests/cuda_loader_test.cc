// Every way the CUDA plug-in can be absent is an `unavailable` that names the file and the reason.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "cuda/plugin.h"
#include "formats/test_files.h"
#include "oracle/oracle_test.h"

namespace bittern {
namespace {

namespace fs = std::filesystem;

fs::path own_directory() { return fs::read_symlink("/proc/self/exe").parent_path(); }

std::string fixture(const std::string& name) {
  return own_directory() / "fixtures" / ("lib" + name + ".so");
}

// A directory that goes away again, and the current directory and environment put back.
class CudaLoader : public ::testing::Test {
 protected:
  void SetUp() override {
    before_ = fs::current_path();
    if (const char* given = std::getenv("BITTERN_CUDA_PLUGIN")) given_ = given;
    unsetenv("BITTERN_CUDA_PLUGIN");
  }
  void TearDown() override {
    fs::current_path(before_);
    if (given_.empty()) {
      unsetenv("BITTERN_CUDA_PLUGIN");
    } else {
      setenv("BITTERN_CUDA_PLUGIN", given_.c_str(), 1);
    }
  }
  TempFolder folder_;
  const fs::path directory_ = folder_.path();
  fs::path before_;
  std::string given_;
};

void expect_unavailable(const Result<const CudaPlugin*>& result, const std::string& path,
                        const std::string& reason) {
  ASSERT_FALSE(result.ok());
  EXPECT_EQ(result.status().code(), Code::unavailable);
  const std::string message(result.status().message());
  EXPECT_NE(message.find(path), std::string::npos) << message;
  EXPECT_NE(message.find(reason), std::string::npos) << message;
}

TEST_F(CudaLoader, NoFile) {
  const std::string path = directory_ / "libbittern_cuda.so";
  expect_unavailable(load_cuda_plugin(path, 0), path, "No such file");
}

TEST_F(CudaLoader, NotASharedObject) {
  const std::string path = directory_ / "libbittern_cuda.so";
  std::ofstream(path) << "these are words, not an ELF file, and there are enough of them to fill "
                         "the header that the dynamic linker wants to read";
  expect_unavailable(load_cuda_plugin(path, 0), path, "ELF");
  std::ofstream(path, std::ios::trunc) << "";
  expect_unavailable(load_cuda_plugin(path, 0), path, "too short");
}

TEST_F(CudaLoader, ADirectory) {
  expect_unavailable(load_cuda_plugin(directory_, 0), directory_, "directory");
}

TEST_F(CudaLoader, NoEntryPoint) {
  const std::string path = fixture("no_entry");
  expect_unavailable(load_cuda_plugin(path, 0), path,
                     "not a bittern plug-in (no bittern_cuda_plugin)");
}

TEST_F(CudaLoader, AnotherBuild) {
  for (const char* name : {"wrong_abi", "null"}) {
    const std::string path = fixture(name);
    expect_unavailable(load_cuda_plugin(path, 0), path, "from another build, expected bittern 0.");
  }
}

TEST_F(CudaLoader, NoDevice) {
  const std::string path = fixture("no_device");
  expect_unavailable(load_cuda_plugin(path, 0), path, "the fixture has no device");
}

TEST_F(CudaLoader, NoSuchDevice) {
  const std::string path = fixture("two_devices");
  EXPECT_TRUE(load_cuda_plugin(path, 0).ok());
  EXPECT_TRUE(load_cuda_plugin(path, 1).ok());
  expect_unavailable(load_cuda_plugin(path, 2), "cuda:2", "no such device, there are 2");
  expect_unavailable(load_cuda_plugin(path, -1), "cuda:-1", "no such device");
}

// The plug-in of this build: it works, or it says what the machine lacks.
TEST_F(CudaLoader, ThisBuild) {
  const std::string path = own_directory() / "libbittern_cuda.so";
  if (!fs::exists(path)) {
    ASSERT_FALSE(oracle::cuda_required()) << path << " was not built";
    GTEST_SKIP() << path << " was not built (no nvcc)";
  }
  const auto found = cuda_plugin_path();
  ASSERT_TRUE(found.ok()) << found.status().message();
  EXPECT_EQ(*found, path);
  const auto plugin = load_cuda_plugin(path, 0);
  if (!plugin) {
    ASSERT_FALSE(oracle::cuda_required()) << plugin.status().message();
    expect_unavailable(plugin, path, fs::exists("/dev/nvidiactl") ? "" : "no NVIDIA driver");
    // A plan says the same and takes no other backend.
    const auto plan = Plan<QuantizePerGroup>::select({.outer_size = 1, .axis_size = 128},
                                                     {Device::Type::cuda, 0});
    ASSERT_FALSE(plan.ok());
    EXPECT_EQ(plan.status().code(), Code::unavailable);
    return;
  }
  expect_unavailable(load_cuda_plugin(path, 1000), "cuda:1000", "no such device");
}

TEST_F(CudaLoader, NeverTheCurrentDirectory) {
  // A file that would load, so that taking it by mistake shows.
  fs::copy_file(fixture("two_devices"), directory_ / "libbittern_cuda.so");
  fs::create_directory(directory_ / "bittern");
  fs::copy_file(fixture("two_devices"), directory_ / "bittern" / "libbittern_cuda.so");
  fs::current_path(directory_);
  const auto path = cuda_plugin_path();
  if (path) {
    EXPECT_EQ(path->front(), '/');
    EXPECT_NE(fs::weakly_canonical(*path).parent_path(), fs::canonical(directory_));
  } else {
    EXPECT_EQ(path.status().code(), Code::unavailable);
    EXPECT_EQ(path.status().message().find(directory_.string()), std::string_view::npos);
  }
  for (const char* relative : {"libbittern_cuda.so", "./libbittern_cuda.so", ""}) {
    setenv("BITTERN_CUDA_PLUGIN", relative, 1);
    const auto refused = cuda_plugin_path();
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.status().code(), Code::unavailable);
    EXPECT_EQ(refused.status().message(), std::string("cuda: BITTERN_CUDA_PLUGIN: ") +
                                              (*relative != '\0' ? relative : "empty") +
                                              ", expected an absolute path");
  }
}

TEST_F(CudaLoader, EnvironmentNamesTheFile) {
  const std::string path = fixture("two_devices");
  setenv("BITTERN_CUDA_PLUGIN", path.c_str(), 1);
  ASSERT_TRUE(cuda_plugin_path().ok());
  EXPECT_EQ(*cuda_plugin_path(), path);
}

}  // namespace
}  // namespace bittern
