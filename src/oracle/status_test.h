// What a status is expected to be.
#pragma once
#include <gtest/gtest.h>

#include <string_view>

#include "bittern/status.h"

namespace bittern::oracle {

inline void expect_ok(const Status& status) { EXPECT_TRUE(status.ok()) << status.message(); }

inline void expect_error(const Status& status, Code code, std::string_view message) {
  EXPECT_EQ(std::string_view(name(status.code())), name(code)) << message;
  EXPECT_EQ(status.message(), message);
}

}  // namespace bittern::oracle
