"""What is trained: the contract, and the tasks that come with tandem."""
