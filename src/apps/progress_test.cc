#include "apps/progress.h"

#include <gtest/gtest.h>

namespace deepinfer {
namespace {

TEST(ProgressText, ShowsRatesAndTimeLeft) {
  EXPECT_EQ(
      ProgressText(
          {.done = 0, .total = 10, .prompt_tokens = 100, .completion_tokens = 0, .seconds = 2}),
      "0/10 done, prompt 50.0 tok/s, output 0.0 tok/s");
  EXPECT_EQ(ProgressText({.done = 5,
                          .total = 20,
                          .failed = 1,
                          .prompt_tokens = 100,
                          .completion_tokens = 30,
                          .seconds = 10}),
            "5/20 done (1 failed), prompt 10.0 tok/s, output 3.0 tok/s, 00:30 left");
  EXPECT_EQ(ProgressText({.done = 1, .total = 1000, .seconds = 10}),
            "1/1000 done, prompt 0.0 tok/s, output 0.0 tok/s, 2:46:30 left");
  EXPECT_EQ(ProgressText(
                {.done = 4, .total = 4, .prompt_tokens = 8, .completion_tokens = 8, .seconds = 61}),
            "4/4 done, prompt 0.1 tok/s, output 0.1 tok/s, took 01:01");
  // What earlier runs did says nothing about the speed of this one.
  EXPECT_EQ(ProgressText({.done = 15, .total = 20, .done_before = 10, .seconds = 10}),
            "15/20 done, prompt 0.0 tok/s, output 0.0 tok/s, 00:10 left");
  EXPECT_EQ(ProgressText({.done = 10, .total = 20, .done_before = 10, .seconds = 10}),
            "10/20 done, prompt 0.0 tok/s, output 0.0 tok/s");
}

TEST(ProgressText, ManagesWithoutATotal) {
  EXPECT_EQ(
      ProgressText({.done = 5, .total = -1, .failed = 2, .completion_tokens = 9, .seconds = 3}),
      "5 done (2 failed), prompt 0.0 tok/s, output 3.0 tok/s");
}

}  // namespace
}  // namespace deepinfer
