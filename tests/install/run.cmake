# cmake -DBUILD=... -DSOURCE=... -DGENERATOR=... -P run.cmake: installs BUILD into a fresh prefix and
# builds and runs, from outside the tree, the examples and README.md's C and C++ blocks.
set(work ${BUILD}/install_test)
file(REMOVE_RECURSE ${work})
file(MAKE_DIRECTORY ${work})

function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "failed: ${ARGN}")
  endif()
endfunction()

run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${work}/prefix --component bittern)
run(${PYTHON} ${SOURCE}/tools/extract_readme.py ${SOURCE}/README.md ${work}/readme)
file(GLOB programs ${SOURCE}/examples/*.cc ${SOURCE}/examples/*.c ${work}/readme/*.cc ${work}/readme/*.c)
run(${CMAKE_COMMAND} -S ${SOURCE}/tests/install -B ${work}/build -G ${GENERATOR}
  "-DCMAKE_PREFIX_PATH=${work}/prefix" "-DPROGRAMS=${programs}" -DCMAKE_BUILD_TYPE=Release
  -DCMAKE_CXX_COMPILER=${CXX} -DCMAKE_C_COMPILER=${CC} "-DCMAKE_CXX_FLAGS=${CXX_FLAGS}"
  "-DCMAKE_EXE_LINKER_FLAGS=${CXX_FLAGS}")
run(${CMAKE_COMMAND} --build ${work}/build)
run(${CMAKE_CTEST_COMMAND} --test-dir ${work}/build --output-on-failure)
