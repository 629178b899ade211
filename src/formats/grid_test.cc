#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <random>

#include "core/blocks.h"
#include "formats/decode.h"
#include "formats/grid.h"

namespace bittern {
namespace {

using Bytes = std::vector<std::byte>;

constexpr GgmlType kTypes[] = {GgmlType::q4_0, GgmlType::q4_1, GgmlType::q5_0, GgmlType::q5_1,
                               GgmlType::q8_0, GgmlType::q4_k, GgmlType::q5_k};
bool has_super_blocks(GgmlType type) { return type == GgmlType::q4_k || type == GgmlType::q5_k; }
bool has_minima(GgmlType type) {
  return has_super_blocks(type) || type == GgmlType::q4_1 || type == GgmlType::q5_1;
}

Bytes from_hex(std::string_view hex) {
  const auto digit = [](char c) { return c <= '9' ? c - '0' : c - 'a' + 10; };
  Bytes out;
  for (std::size_t i = 0; i < hex.size(); i += 2)
    out.push_back(static_cast<std::byte>(digit(hex[i]) * 16 + digit(hex[i + 1])));
  return out;
}

CheckpointTensor tensor_of(const Storage& storage, const Shape& shape, const Bytes& data) {
  CheckpointTensor tensor;
  tensor.name = "t";
  tensor.storage = storage;
  tensor.shape = shape;
  tensor.data = data;
  return tensor;
}
CheckpointTensor tensor_of(const Storage& storage, const Shape& shape, const EncodedRows& rows) {
  CheckpointTensor tensor = tensor_of(storage, shape, rows.data);
  tensor.scales = rows.scales;
  tensor.biases = rows.biases;
  return tensor;
}
GridRows grid(const CheckpointTensor& tensor) {
  GridRows rows;
  const Status status = decode_grid(tensor, 0, tensor.rows(), rows);
  EXPECT_TRUE(status.ok()) << status.message();
  return rows;
}
EncodedRows encoded(const GridRows& rows, std::int64_t columns, const Storage& storage) {
  EncodedRows out;
  const Status status = encode_grid(rows, columns, storage, out);
  EXPECT_TRUE(status.ok()) << storage.str() << ": " << status.message();
  return out;
}
std::string why_not(const GridRows& rows, std::int64_t columns, const Storage& storage) {
  EncodedRows out;
  return std::string(encode_grid(rows, columns, storage, out).message());
}
std::vector<float> numbers(const CheckpointTensor& tensor) {
  std::vector<float> out(static_cast<std::size_t>(tensor.rows() * tensor.columns()));
  const Status status = decode_rows(tensor, 0, tensor.rows(), out);
  EXPECT_TRUE(status.ok()) << status.message();
  return out;
}

// ---- against peers ----

// Random blocks of 256 weights. gguf 0.19.0: y = gguf.dequantize(blocks, type); codes, scales and
// biases were read from the blocks by numpy, and mlx 0.32.4 says that mx.dequantize(weight, scales,
// biases, group_size=32) == y for every weight, bit for bit but for the sign of zeros in the types
// without minima.
struct Golden {
  GgmlType type;
  int bits;
  std::string_view blocks, weight, scales, biases;
};
constexpr Golden kGolden[] = {
    {GgmlType::q4_0, 4,
     "0ebaee719123c589df108c848799e057ef331c2ccc307b5e653361a82005df5f6da12d73c38bc9fcd3f5c12f"
     "a950fca1ea5c4e6d3c7ec323c97e75c1297c785479e01aac76150fae7134b173181e7b1f1546159e7f203e0d"
     "149c8b8add23a6d9e702a5d8d9fe46025cf5b3f8413b90fa682bfc956578b6d364407ec4de9519207ce95027"
     "0c334f0cb5c8e34360bd1a35",
     "1e31950f4c97703f7e298c1d88985e3e0ceb358150ff1d3d3c5736a6025da672c953f1091ccadeecfcfd2c5a"
     "af5e6473e915c94809ca56ef7cc77257e7a117a031e8fb65e50fdec47b111741912703913d962785e9265c83"
     "2dda0edafd04f5fba0b85c8536044e5ef9269f76db46c79d9c703ccf8533d05ae7253004cb4eb631",
     "00c041bf0080833d006078b90060783c00208e3e006051b90020683f0020033c",
     "00c0c140008003bf0060f83a0060f8bd00200ec00060d13a0020e8c0002083bd"},
    {GgmlType::q4_1, 4,
     "3e84f2b660c43b96169cc65323c8b35127b0886df9411614cf384ad0d81a10e36e922842c23c427482393c15"
     "48190c8a6ff64a9121fa71f8e81fd43aaf206d266fa17dc241f810e51ad9df693e90a25c75bb84ad8cebe14f"
     "16ecf3792c2b9ce1904be96290299420cc56ad842d1cdddd0d35a0d42194e8d3f842dbb425080ce5200a3c4f"
     "95404c0fb43486b6d02545ac18dde9b3a27770c66fde4c7b4868d56f",
     "406bc636831307d8c693915cc25bb2688f0aa8302e28c2423cd41de196423c7498ac6f1aa181f8a41480f694"
     "f2f71e3d1f2d81509a9f0ec2a6c7f4e1d16d935abcf1c693bc1cb029e84ee17f22e9496e6c4dcddd5d404138"
     "5c8a12dd30da92de855ca0fc05fc446602e0024349043bb8d8397260efbc88f5d1be7ac7d674646d",
     "00c087b800203f400040303f00e0153c00a06ebf0000323d00005f400000ba3c",
     "0040debe00c0823a0080a73a00a0cd3c0080b0bd0080123c00609bbe00a088bd"},
    {GgmlType::q5_0, 5,
     "1e8935e47319c76507820148ace2bc8681b9280f9c5e2db82c2e2e6f3d57a492c16d35a171b2495050e57031"
     "959009c81031e70be060d8d362340d21566f69fed1db439d5dccc0d52569be3635e22b0f79f4849257686db9"
     "db8ff66116dae4ce034d424f25444bdf35c581180f3afd0a80b7fcc9e157d579478c27b6a666e38750d7c65e"
     "18b5a927595a02d4f306fbf437b5f06ddf4facfcaae244305bdc52433534b89537fb13f5838c4b8a14c84d35",
     "b75c113113ccc4843ef7dc0204a9761ba12d412aed50197a094166082a08a3eaccec5077d35afc1d77018886"
     "202d989f5cdc0e38d39b195014637f6b35795bc57e89507950cfc2ac319c84f7e1548dddc4cf267fa5fb9512"
     "f0578e43428920a40f8e039ce19474d8b1d6ce03aff1aef44bb1dcda385c1aaf920cbbe8a9b0ffc7b812b03d"
     "f8df5ccf36aa9f7695a27ad72c836d4d51af63ae345f7c181314181d",
     "00c023b900a005bf00a012ba0060a8bb0060fbb900a05f390000a3be0080083e",
     "00c0233b00a0054100a0123c0060a83d0060fb3b00a05fbb0000a340008008c0"},
    {GgmlType::q5_1, 5,
     "7540213082cffd75f5677780903bfe1ffb818b5fbbb75596b19013bd62cf98f73bcd9e7961ac532fa42348f7"
     "31496bf62038f2199adc391e5d8b212462c19093b577ab38e08f6f2c100982bd0f08f8fecdfa6ae781fdbe8c"
     "62e2fb1b302b29dfa7274392bef31eb524774b75b0f6d472b4aa76cb07f5754246b45832463d42dfe7342c44"
     "2c58a1e2e52799d4806ab6c89104051350cf8ece37b7cc0c5b47af0a687e7f1d4de1113843067c3e8c38f68d"
     "ba40796a23a11c14d389d4551f831a97",
     "e51e0096fb3beebf4eb5df5c9ce78f1fe1b2774dabbb14f87c74e21bd2b683a56b55915ad237a9fd6d072a03"
     "98e56c0cdfe7150969794aebeae991115deb1b9a6342ac0d567aec198fffc6c6ff38a5ece4ee0a2d91549b75"
     "6b95e2d2bb5f3b5b5d06ffa18772c25014f5640ab5416e0a228a765ee68ecde6e730b6cf57d8ffde42c46373"
     "588882e6de485c9c0a643d02a32391faa73a8b5e23758c1df51a50c8",
     "00a00e40002016ba0000043f0000223900e0f43c00c088be002092380060c838",
     "0020043e0060a2bf00403e3b0040b0bf006048ba00004b3e00a0603a0080cf3f"},
    {GgmlType::q8_0, 8,
     "538b29ecf537734de8a6d517db34ce1df7d1622c0dbcb3aa9a339abc26d1b3c5fcba2ba43a3a44589933f14a"
     "8f8858ec61c859de501277b2d1feb26ecc9d9c894f5352355c0b87e5f9936151020e1acfad8ba25d4f93b09a"
     "1bc7cf30e50c5440dc1c35d0867afb1bd4fda5d0f0c4dd9e25580fde4dd799e55a65da9e86645af0a8e21e8b"
     "32eeb70f3a886c3d2341d8868bdffb19aa09ecef2d87db128e4e576e897cb0a2d7baf8c08b3cde2c8e19d13a"
     "fb4ad770fbcd03df2b1a7775d792a32c67dc0128edda0a4318b66e6103bced3e03b041cd8f896024bd485ab1"
     "e8a160ab10fecb6ebc21bfd7032e134842efe5b24d25055114d9fe326b866b01100bbb65e39cca067dab064d"
     "8c0edafac84c52a3",
     "a96c75b7f3cd682655975bb44e9d7751e2ac8d3c332a1ab31a3ca65133457c3ababac4d819b371ca0f08d86c"
     "e148d95ed092f732517e32ee4c1d1c09cfd3d2b507657913e1d1828e9a4f2d0b22ddcf13301a9b474fb0658c"
     "d4c05c9cb55006fa547d255070445d1ea5d88f5ecd571965dae55a1e06e4da7028629e0bb26e378fecbda3c1"
     "58060b5f7b992a896c6fad075b920eced7ee09fc3022573a78400bbc0e9951ba7bca57f07b4d835fab9af7f5"
     "571223ace75c81a86d5a8ac39836eee16dbe8330c14d0f09e0a43dc8da316821e02b907e4bee3ca13f5783ae"
     "93c8c26fcda585d194597eb2eb06eb81908b3be5631c4a86fd2b86cd0c8e5a7a48ccd223",
     "00606ab9006085bc00806b3900607f3b004007b900c09b3d006080bf00a05cbe",
     "0060ea3c006005400080ebbc0060ffbe0040873c00c01bc10060004300a0dc41"},
    {GgmlType::q4_k, 4,
     "7c36ccb3d9c47d68ad7aa4e524221a26d316f7952be3e0ae110cc61d0cc9b692527140ce3cdc75dc6df57c76"
     "d590914105dee71c87672aa8abcf478a90d1ee173fd21a6feaa03e4f6a9faa0e1ae55e6eb726fc63c2c62bce"
     "9fdfeba6824f035921db64b810906f9e7cb9068c4b376cfce4a43d026e083ff2971605de10ca447add649d05"
     "b4da94359be8d9e37c9b909d",
     "63573be0c1d69c2612e0ccc55d6c05111d9fe2ae011cc09b75c4d3d7f6779d49e5c7778afba7107e2ffa0afe"
     "faea5aeed01e68a2ca84d91ed361ae43960ae165673c62ebff6bf293b18400ef9cc67bcc2b6fccc2d9ae4850"
     "d2b69196b78034f6442d8e2f67e5a0a44d5da4548b39bcd0ae0306f319d0c1746d09db39e9ed9799",
     "001c22410080cf3f00c6c54100b081410098a841001ca2410098284100a80e41",
     "006e2f41001c624100580c41003e1041008c044100588c4000a6004100ec4241"},
    {GgmlType::q5_k, 5,
     "6740aca814809c3662e7dea697b02a491ffd8a7f01fdfc27e16d492aceeabc0ec794d8faecb2e2757a5a088e"
     "13d3eec5680b2e1a2e2fd95f7ed16530890b01f41b8c8713eae2f45913e05a00cb5f786148397794d65934da"
     "1a118d19181b08a9e987459e3c51cb88e70b57a02d00723cc85bcc0169e16a16a07e140bfb02ec29485ab9ff"
     "213c562a20ec1a3c39223d6ba6c94f4cee8ea954868b616bcdba118c2162d487e7cb84427a42b2f3e1b2c8ae",
     "783bed7ffa3e569056209b9da104c90328b03f8a16c82844aba7998921f811a1e8fc2fd117c8eb35381f6a32"
     "d52ab68417cef916c7c3c2671dd880e474dedcea6c21e21823d40ed13c0b431e562dc01d78b398a236c091b5"
     "044f48e71fb8d1902b96655bac3268bc8dfa06f8a017a4ac2f6795d28531c434263fee7c2676c7d5756051d0"
     "7b17955a8a1124f68a53e2b02e1819c37744d276ec392687acef36d7",
     "00183042000000000088764200baed420088764100e08c4200e6b842007c9e41",
     "00d89e3f0034b63f00288c3f0088b13f0098693f00d209400098e93f0030a83f"},
};

TEST(Grid, WhatMlxIsGivenEqualsWhatGgufComputes) {
  for (const Golden& golden : kGolden) {
    const Bytes blocks = from_hex(golden.blocks);
    const CheckpointTensor tensor = tensor_of(Storage::blocks(golden.type), {1, 256}, blocks);
    const GridRows rows = grid(tensor);
    EXPECT_EQ(rows.bits, golden.bits);
    EXPECT_EQ(rows.group, 32);
    const EncodedRows mlx = encoded(rows, 256, Storage::affine(golden.bits, 32, SafeDType::f32));
    EXPECT_EQ(mlx.data, from_hex(golden.weight)) << tensor.storage.str();
    EXPECT_EQ(mlx.scales, from_hex(golden.scales)) << tensor.storage.str();
    EXPECT_EQ(mlx.biases, from_hex(golden.biases)) << tensor.storage.str();
  }
}

// ---- there and back ----

// Blocks of random bytes with finite scales. As ggml writes super-blocks, one of their 6-bit scales
// and one of their minima is 63.
Bytes random_blocks(GgmlType type, std::size_t count, std::mt19937& random, bool full = true) {
  const GgmlTypeInfo& about = info(type);
  Bytes bytes(count * about.block_bytes);
  for (auto& b : bytes) b = static_cast<std::byte>(random() & 255);
  for (std::size_t i = 0; i < count; ++i) {
    auto* block = reinterpret_cast<std::uint8_t*>(bytes.data()) + i * about.block_bytes;
    for (int half = 0; half < (has_minima(type) ? 2 : 1); ++half) {
      const auto exponent = random() % 31, rest = random() & 0x83ff;
      const auto bits = static_cast<std::uint16_t>(exponent << 10 | rest | 1);
      std::memcpy(block + 2 * half, &bits, 2);
    }
    if (has_super_blocks(type) && full) {
      block[4 + random() % 4] |= 63;
      block[8 + random() % 4] |= 63;
    }
  }
  return bytes;
}

TEST(Grid, BlocksToMlxAndBack) {
  std::mt19937 random(1);
  for (const GgmlType type : kTypes) {
    const Storage blocks = Storage::blocks(type);
    const int bits = grid_of(blocks)->bits;
    const Shape shape{3, 1024};
    const std::size_t count = 3 * 1024 / info(type).block;
    for (int round = 0; round < 20; ++round) {
      const Bytes bytes = random_blocks(type, count, random);
      const CheckpointTensor source = tensor_of(blocks, shape, bytes);
      const Storage affine = Storage::affine(bits, 32, SafeDType::f32);
      const EncodedRows mlx = encoded(grid(source), 1024, affine);
      EXPECT_EQ(mlx.data.size() + mlx.scales.size() + mlx.biases.size(), *affine.bytes(shape));
      const CheckpointTensor there = tensor_of(affine, shape, mlx);

      const std::vector<float> ours = numbers(there), theirs = numbers(source);
      for (std::size_t i = 0; i < ours.size(); ++i) {
        ASSERT_EQ(ours[i], theirs[i]) << blocks.str();
        if (has_minima(type) || ours[i] != 0) {
          ASSERT_EQ(std::bit_cast<std::uint32_t>(ours[i]), std::bit_cast<std::uint32_t>(theirs[i]))
              << blocks.str();
        }
      }
      const EncodedRows back = encoded(grid(there), 1024, blocks);
      EXPECT_EQ(back.data, bytes) << blocks.str();
      EXPECT_TRUE(back.scales.empty() && back.biases.empty());
    }
  }
}

// Where no scale is 63, a smaller d may give the same numbers.
TEST(Grid, AnySuperBlockKeepsItsNumbers) {
  std::mt19937 random(2);
  for (const GgmlType type : {GgmlType::q4_k, GgmlType::q5_k}) {
    const Storage blocks = Storage::blocks(type);
    for (int round = 0; round < 100; ++round) {
      Bytes bytes = random_blocks(type, 2, random, false);
      if (round % 2 == 0) {  // small scales, many of them alike
        for (std::size_t i = 4; i < 16; ++i) bytes[i] &= std::byte{0x07};
      }
      if (round % 10 == 0) std::fill_n(bytes.begin() + 4, 12, std::byte{0});  // none at all
      const CheckpointTensor source = tensor_of(blocks, {1, 512}, bytes);
      const EncodedRows back = encoded(grid(source), 512, blocks);
      EXPECT_EQ(numbers(tensor_of(blocks, {1, 512}, back)), numbers(source));
      // What was chosen once is chosen again.
      EXPECT_EQ(encoded(grid(tensor_of(blocks, {1, 512}, back)), 512, blocks).data, back.data);
    }
  }
}

TEST(Grid, TablesOfIntegersAreGrids) {
  // 8 bits for IQ4's values, 5 for MXFP4's: the numbers stay, in MLX and in the blocks that can
  // hold such codes.
  std::mt19937 random(31);
  for (const GgmlType type : {GgmlType::iq4_nl, GgmlType::iq4_xs, GgmlType::mxfp4}) {
    const auto size = static_cast<std::size_t>(info(type).block_bytes);
    const std::size_t count = 512 / info(type).block;
    Bytes blocks(4 * count * size);
    for (std::size_t i = 0; i < blocks.size(); ++i) blocks[i] = static_cast<std::byte>(random());
    for (std::size_t i = 0; i < 4 * count; ++i) {
      // A finite d, negative or subnormal now and then; of MXFP4 scales that F16 holds.
      if (type == GgmlType::mxfp4) {
        blocks[i * size] = static_cast<std::byte>(110 + random() % 24);
      } else {
        blocks[i * size + 1] &= std::byte{0xbf};
      }
    }
    const auto tensor = tensor_of(Storage::blocks(type), {4, 512}, blocks);
    const auto wanted = numbers(tensor);
    const GridRows rows = grid(tensor);
    EXPECT_EQ(rows.bits, type == GgmlType::mxfp4 ? 5 : 8);
    EXPECT_EQ(rows.group, 32);
    const auto mlx = Storage::affine(rows.bits, 32, SafeDType::f32);
    EXPECT_EQ(numbers(tensor_of(mlx, {4, 512}, encoded(rows, 512, mlx))), wanted)
        << info(type).name;
    // IQ4_XS has scales that F16 does not hold.
    if (type != GgmlType::iq4_xs) {
      const auto held = Storage::blocks(type == GgmlType::mxfp4 ? GgmlType::q5_0 : GgmlType::q8_0);
      EXPECT_EQ(numbers(tensor_of(held, {4, 512}, encoded(rows, 512, held))), wanted)
          << info(type).name;
    }
    EXPECT_EQ(why_not(rows, 512, Storage::blocks(type)),
              std::string(info(type).name) +
                  ", expected Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K or affine groups");
  }
  // The largest scales: 16 times 2^124 is no bias.
  Bytes huge(17);
  huge[0] = std::byte{251};
  GridRows rows = grid(tensor_of(Storage::blocks(GgmlType::mxfp4), {1, 32}, huge));
  EXPECT_EQ(rows.scales[0], 0x1p123f);
  huge[0] = std::byte{252};
  EXPECT_EQ(
      decode_grid(tensor_of(Storage::blocks(GgmlType::mxfp4), {1, 32}, huge), 0, 1, rows).message(),
      "tensor \"t\": row 0, columns 0..31: scale 2.12676479e+37 and bias -inf, expected finite "
      "ones");
}

TEST(Grid, RowsOfATensor) {
  std::mt19937 random(3);
  for (const GgmlType type : kTypes) {
    const Bytes bytes = random_blocks(type, 5 * 256 / info(type).block, random);
    const CheckpointTensor tensor = tensor_of(Storage::blocks(type), {5, 256}, bytes);
    const GridRows all = grid(tensor);
    GridRows some;
    ASSERT_TRUE(decode_grid(tensor, 3, 2, some).ok());
    EXPECT_EQ(some.first, 3);
    EXPECT_TRUE(std::equal(some.codes.begin(), some.codes.end(), all.codes.begin() + 3 * 256,
                           all.codes.end()));
    EXPECT_TRUE(std::equal(some.scales.begin(), some.scales.end(), all.scales.begin() + 3 * 8,
                           all.scales.end()));
    ASSERT_TRUE(decode_grid(tensor, 5, 0, some).ok());
    EXPECT_TRUE(some.codes.empty());
    EXPECT_EQ(decode_grid(tensor, 4, 2, some).message(),
              "tensor \"t\": 2 rows from row 4, expected some of its 5");
  }
}

// ---- other grids ----

// Rows of 256 codes 0, 1, 2, ... with one scale and bias for all.
GridRows even_grid(int bits, int group, float scale, float bias, std::size_t rows = 2) {
  GridRows grid;
  grid.bits = bits;
  grid.group = group;
  for (std::size_t i = 0; i < rows * 256; ++i)
    grid.codes.push_back(static_cast<std::uint8_t>(i % (1u << bits)));
  grid.scales.assign(rows * 256 / static_cast<std::size_t>(group), scale);
  grid.biases.assign(grid.scales.size(), bias);
  return grid;
}
void expect_values(const GridRows& rows, const Storage& storage) {
  const Shape shape{static_cast<std::int64_t>(rows.codes.size()) / 256, 256};
  const std::vector<float> values = numbers(tensor_of(storage, shape, encoded(rows, 256, storage)));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::size_t g = i / static_cast<std::size_t>(rows.group);
    ASSERT_EQ(values[i],
              std::fma(static_cast<float>(rows.codes[i]), rows.scales[g], rows.biases[g]))
        << storage.str();
  }
}

TEST(Grid, LargerGroupsAreSplitAndCodesWidened) {
  for (const int group : {32, 64, 128, 256}) {
    const GridRows rows = even_grid(3, group, 0.125f, -0.75f);
    for (const GgmlType type : {GgmlType::q4_1, GgmlType::q5_1, GgmlType::q4_k, GgmlType::q5_k})
      expect_values(rows, Storage::blocks(type));
    expect_values(rows, Storage::affine(3, 32, SafeDType::bf16));
    expect_values(rows, Storage::affine(8, 32, SafeDType::f16));
  }
  // Signed types: -0.75 is -6 times the scale, so that codes move.
  const GridRows rows = even_grid(3, 64, 0.125f, -0.75f);
  for (const GgmlType type : {GgmlType::q4_0, GgmlType::q5_0, GgmlType::q8_0})
    expect_values(rows, Storage::blocks(type));
  // All the same number, or none at all.
  for (const float bias : {0.5f, 0.0f}) {
    const GridRows flat = even_grid(4, 32, 0.0f, bias);
    expect_values(flat, Storage::blocks(GgmlType::q4_1));
    expect_values(flat, Storage::blocks(GgmlType::q4_k));
  }
  expect_values(even_grid(4, 32, 0.0f, 0.0f), Storage::blocks(GgmlType::q4_0));
}

TEST(Grid, WhatCannotBeExact) {
  const Storage q4_0 = Storage::blocks(GgmlType::q4_0), q4_1 = Storage::blocks(GgmlType::q4_1),
                q4_k = Storage::blocks(GgmlType::q4_k), q8_0 = Storage::blocks(GgmlType::q8_0);
  EXPECT_EQ(why_not(even_grid(4, 32, 0.1f, 0), 256, q4_1),
            "row 0, columns 0..31: scale 0.100000001, expected one that F16 holds for Q4_1");
  EXPECT_EQ(why_not(even_grid(4, 32, 1e6f, 0), 256, q8_0),
            "row 0, columns 0..31: scale 1000000, expected one that F16 holds for Q8_0");
  GridRows rows = even_grid(4, 32, 0.5f, -4);
  rows.first = 40;
  rows.biases[11] = 0.1f;
  EXPECT_EQ(why_not(rows, 256, q4_1),
            "row 41, columns 96..127: bias 0.100000001, expected one that F16 holds for Q4_1");
  EXPECT_EQ(why_not(rows, 256, q4_0),
            "row 41, columns 96..127: scale 0.5 and bias 0.100000001, expected a bias of -8 times "
            "the scale for Q4_0");
  EXPECT_EQ(why_not(even_grid(4, 32, 0, 1), 256, q4_0),
            "row 0, columns 0..31: scale 0 and bias 1, expected a bias of -8 times the scale for "
            "Q4_0");
  EXPECT_EQ(why_not(even_grid(4, 32, 0.5f, -3.5f), 256, q4_0),
            "row 0, columns 0..31: code 16, expected 0..15 for Q4_0");
  EXPECT_EQ(why_not(even_grid(5, 32, 0.5f, -8), 256, q4_1),
            "row 0, columns 0..31: code 16, expected 0..15 for Q4_1");
  EXPECT_EQ(why_not(rows, 256, q4_k),
            "row 41, columns 0..255: biases -4 -4 -4 0.100000001 -4 -4 -4 -4, expected -dmin in "
            "F16 times 0..63 for Q4_K");
  rows = even_grid(4, 32, 1, 0);
  rows.scales[3] = 64;  // 64 to 1 is more than 6 bits
  EXPECT_EQ(why_not(rows, 256, q4_k),
            "row 0, columns 0..255: scales 1 1 1 64 1 1 1 1, expected d in F16 times 0..63 for "
            "Q4_K");
  rows.scales[3] = -1;  // one d has one sign
  EXPECT_FALSE(why_not(rows, 256, q4_k).empty());
  rows.scales[3] = 63;
  EXPECT_EQ(why_not(rows, 256, q4_k), "");

  EXPECT_EQ(why_not(even_grid(4, 32, 0.1f, 0), 256, Storage::affine(4, 32, SafeDType::f16)),
            "row 0, columns 0..31: scale 0.100000001 and bias 0, expected ones that F16 holds");
  EXPECT_EQ(why_not(even_grid(4, 32, 1, 257), 256, Storage::affine(4, 32, SafeDType::bf16)),
            "row 0, columns 0..31: scale 1 and bias 257, expected ones that BF16 holds");
  EXPECT_EQ(why_not(even_grid(4, 64, 1, 0), 256, Storage::affine(3, 32, SafeDType::f32)),
            "row 0, columns 0..63: code 8, expected 0..7 for 3 bit, group 32, F32");
  EXPECT_EQ(why_not(even_grid(4, 32, 1, 0), 256, Storage::affine(4, 64, SafeDType::f32)),
            "groups of 32, expected a multiple of 64 for 4 bit, group 64, F32");
  EXPECT_EQ(why_not(even_grid(4, 16, 1, 0), 256, q4_1),
            "groups of 16, expected a multiple of 32 for Q4_1");
  EXPECT_EQ(why_not(even_grid(4, 32, 1, 0), 128, q4_k),
            "rows of 128, expected a multiple of 256 for Q4_K");
  EXPECT_EQ(why_not(even_grid(4, 32, 1, 0), 256, Storage::blocks(GgmlType::q6_k)),
            "Q6_K, expected Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K or affine groups");
  EXPECT_EQ(why_not(even_grid(4, 32, 1, 0), 256, Storage::plain(SafeDType::f32)),
            "F32, expected Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K or affine groups");
  rows.scales.pop_back();
  EXPECT_EQ(why_not(rows, 256, q4_1),
            "512 codes of 4 bits in rows of 256, 15 scales and 16 biases, expected one of each for "
            "every 32 codes");
}

TEST(Grid, WhatHasNone) {
  EXPECT_FALSE(grid_of(Storage::plain(SafeDType::f32)));
  for (const GgmlType type : {GgmlType::q2_k, GgmlType::q3_k, GgmlType::q6_k, GgmlType::iq2_xs})
    EXPECT_FALSE(grid_of(Storage::blocks(type))) << info(type).name;
  EXPECT_EQ(grid_of(Storage::affine(3, 64, SafeDType::f16))->group, 64);

  GridRows rows;
  const Bytes bytes(210);
  EXPECT_EQ(decode_grid(tensor_of(Storage::blocks(GgmlType::q6_k), {1, 256}, bytes), 0, 1, rows)
                .message(),
            "tensor \"t\": Q6_K has no affine grid, expected Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, "
            "Q5_K, IQ4_NL, IQ4_XS, MXFP4 or affine groups");
  EXPECT_EQ(
      decode_grid(tensor_of(Storage::plain(SafeDType::u8), {1, 210}, bytes), 0, 1, rows).message(),
      "tensor \"t\": U8 has no codes, expected Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, IQ4_NL, "
      "IQ4_XS, MXFP4 or affine groups");
  // An infinite d: infinity times 8, less infinity.
  Bytes infinite(4 * 18);
  infinite[2 * 18 + 1] = std::byte{0x7c};
  EXPECT_EQ(decode_grid(tensor_of(Storage::blocks(GgmlType::q4_0), {2, 64}, infinite), 0, 2, rows)
                .message(),
            "tensor \"t\": row 1, columns 0..31: scale inf and bias -inf, expected finite ones");
}

TEST(Grid, ParametersThatAreRounded) {
  GridRows rows = even_grid(4, 32, 1, -0.5f);
  EXPECT_EQ(round_params(rows, Storage::affine(4, 32, SafeDType::f16)), 0);
  rows.scales[3] = 1 + 0x1p-12f;  // f16 has 10 bits below 1
  rows.biases[5] = -1 - 0x1p-11f;
  EXPECT_EQ(round_params(rows, Storage::affine(4, 32, SafeDType::f32)), 0);
  EXPECT_EQ(rows.scales[3], 1 + 0x1p-12f);
  GridRows bf = rows;
  EXPECT_EQ(round_params(rows, Storage::affine(4, 32, SafeDType::f16)), 0x1p-11 / (1 + 0x1p-11));
  EXPECT_EQ(rows.scales[3], 1);
  EXPECT_EQ(rows.biases[5], -1);
  EXPECT_EQ(round_params(rows, Storage::affine(4, 32, SafeDType::f16)), 0);
  bf.scales[4] = 1 + 0x1p-8f;
  EXPECT_EQ(round_params(bf, Storage::affine(4, 32, SafeDType::bf16)), 0x1p-8 / (1 + 0x1p-8));
  bf.scales[0] = 1e6f;
  EXPECT_EQ(round_params(bf, Storage::affine(4, 32, SafeDType::f16)), INFINITY);
}

// ---- AWQ and GPTQ ----

// Symmetric 4 bits in groups of 32, zero points 8 (stored as 7): what Q4_0 is.
struct Gptq {
  Bytes codes = Bytes(16 * 32 / 2), zeros = Bytes(16 / 2), scales = Bytes(16 * 2),
        index = Bytes(32 * 4);
  CheckpointTensor tensor;

  Gptq() {
    for (std::size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<std::byte>(i * 7);
    std::fill(zeros.begin(), zeros.end(), std::byte{0x77});
    for (std::uint16_t r = 0; r < 16; ++r) {
      const std::uint16_t half = static_cast<std::uint16_t>(0x2c00 + 37 * r);
      std::memcpy(scales.data() + 2 * r, &half, 2);
    }
    tensor.name = "t";
    tensor.shape = {16, 32};
    tensor.storage = Storage::affine(4, 32, SafeDType::f16);
    tensor.layout = CheckpointTensor::Layout::gptq;
    tensor.data = codes;
    tensor.biases = zeros;
    tensor.scales = scales;
    tensor.group_index = index;
  }
};

TEST(Grid, GptqToBlocks) {
  Gptq gptq;
  for (const GgmlType type : {GgmlType::q4_0, GgmlType::q4_1, GgmlType::q8_0}) {
    const Storage storage = Storage::blocks(type);
    const EncodedRows rows = encoded(grid(gptq.tensor), 32, storage);
    EXPECT_EQ(numbers(tensor_of(storage, {16, 32}, rows)), numbers(gptq.tensor));
  }
  // Any zero point of 4 bits leaves codes that Q5_0 holds.
  Gptq any;
  for (std::size_t i = 0; i < any.zeros.size(); ++i)
    any.zeros[i] = static_cast<std::byte>(i * 0x21 + 0xf0);
  const Storage q5_0 = Storage::blocks(GgmlType::q5_0);
  EXPECT_EQ(numbers(tensor_of(q5_0, {16, 32}, encoded(grid(any.tensor), 32, q5_0))),
            numbers(any.tensor));
  // With f16 scales MLX would round each number to f16.
  const Storage mlx = Storage::affine(4, 32, SafeDType::f32);
  EXPECT_EQ(numbers(tensor_of(mlx, {16, 32}, encoded(grid(gptq.tensor), 32, mlx))),
            numbers(gptq.tensor));

  GridRows rows;
  gptq.tensor.storage.group = 16;  // two groups, and columns 0 and 16 change places
  Bytes scales(2 * 16 * 2, std::byte{0x2c}), zeros(2 * 16 / 2);
  gptq.tensor.scales = scales;
  gptq.tensor.biases = zeros;
  for (std::size_t c = 0; c < 32; ++c)
    gptq.index[4 * c] = static_cast<std::byte>(c == 0 || (c > 16 && c < 32) ? 1 : 0);
  EXPECT_EQ(decode_grid(gptq.tensor, 0, 16, rows).message(),
            "tensor \"t\": the columns of a group lie apart (g_idx), expected side by side");
  gptq.tensor.biases = {};
  EXPECT_EQ(decode_grid(gptq.tensor, 0, 16, rows).message(),
            "tensor \"t\": 448 bytes, expected those of [16,32] of 4 bit, group 16, F16");

  // 0.1 in f32 has 24 bits, and 27 of them times 7.
  Gptq wide;
  const std::vector<float> tenths(16, 0.1f);
  const auto bytes = std::as_bytes(std::span(tenths));
  wide.tensor.scales = bytes;
  wide.tensor.storage.dtype = SafeDType::f32;
  std::fill(wide.zeros.begin(), wide.zeros.end(), std::byte{0x66});
  EXPECT_EQ(decode_grid(wide.tensor, 2, 3, rows).message(),
            "tensor \"t\": row 2, columns 0..31: scale 0.100000001 times zero point 7, expected a "
            "product that F32 holds");
}

}  // namespace
}  // namespace bittern
