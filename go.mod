module hermes-box-lite

go 1.26.5
